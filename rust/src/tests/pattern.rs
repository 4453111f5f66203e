use super::*;

fn cut<'t>(pattern: &Pattern, text: &'t [u8]) -> Vec<&'t [u8]> {
    let mut found = Vec::new();
    let each = |bounds: &[usize]| {
        found.extend(bounds.windows(2).map(|piece| &text[piece[0]..piece[1]]));
        true
    };
    pattern.for_each_batch(text, each).unwrap();
    found
}

#[test]
fn any_expression_loses_nothing() {
    let pattern = Pattern::new(r"\p{N}+").unwrap();
    assert_eq!(cut(&pattern, b"ab12\xFF\xFFc3"), [&b"ab"[..], b"12", b"\xFF", b"\xFF", b"c", b"3"]);
    assert!(Pattern::new("(").is_err());
}

/// A part may end inside a character: what is cut off the text must hold whatever follows.
#[test]
fn an_unfinished_character_is_no_place_to_cut() {
    for (pattern, text) in [("gpt2", "a𝐀"), ("gpt2", "1𝟏"), ("cl100k", "1𝟏"), ("llama3", "a𝐀")] {
        let cutter = Cutter::new(pattern, &[]).unwrap();
        for size in 0..text.len() {
            assert_eq!(cutter.last_cut(&text.as_bytes()[..size]), None, "{text}, {size} bytes");
        }
    }
}

/// Or a stream of such lines would be held to its end.
#[test]
fn lines_of_punctuation_are_cut() {
    for pattern in ["cl100k", "llama3"] {
        let cutter = Cutter::new(pattern, &[]).unwrap();
        assert_eq!(cutter.last_cut(b"--\n--\r\n---\n--\n--"), Some(11), "{pattern}");
        assert_eq!(cutter.last_cut(b"-------------------"), None);
    }
}
