use super::*;

fn cut<'t>(pattern: &Pattern, text: &'t [u8]) -> Vec<&'t [u8]> {
    let mut found = Vec::new();
    let each = |bounds: &[usize]| bounds.windows(2).for_each(|piece| found.push(&text[piece[0]..piece[1]]));
    pattern.for_each_batch(text, each).unwrap();
    found
}

#[test]
fn any_expression_loses_nothing() {
    let pattern = Pattern::new(r"\p{N}+").unwrap();
    assert_eq!(cut(&pattern, b"ab12\xFF\xFFc3"), [&b"ab"[..], b"12", b"\xFF", b"\xFF", b"c", b"3"]);
    assert!(Pattern::new("(").is_err());
}
