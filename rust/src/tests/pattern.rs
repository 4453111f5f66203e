use super::*;

fn cut<'t>(pattern: &Pattern, text: &'t [u8]) -> Vec<&'t [u8]> {
    let mut found = Vec::new();
    let each = |bounds: &[usize]| bounds.windows(2).for_each(|piece| found.push(&text[piece[0]..piece[1]]));
    pattern.for_each_batch(text, each).unwrap();
    found
}

const CL100K: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The scanner against the engine on random text full of traps, and its safe cuts against the uncut text.
#[test]
fn scanners_equal_the_engine_and_safe_cuts_change_nothing() {
    let alphabet = [
        "a", "S", "re", "VE", "'", "'", "ſ", " ", " ", "\n", "\r", "1", "23", ".", "(", "中", "\u{3000}", "é", "٣",
        "\u{85}",
    ];
    let mut state = 9u64;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize
    };
    for (name, expression) in [("cl100k", CL100K), ("llama3", LLAMA3)] {
        let (fast, engine) = (Pattern::new(name).unwrap(), Pattern::new(expression).unwrap());
        for _ in 0..4000 {
            let text: String = (0..next() % 16).map(|_| alphabet[next() % alphabet.len()]).collect();
            let whole = cut(&fast, text.as_bytes());
            assert_eq!(whole, cut(&engine, text.as_bytes()), "{text:?}");
            for at in (1..text.len()).filter(|&at| fast.is_safe_cut(text.as_bytes(), at)) {
                let parts = [cut(&fast, &text.as_bytes()[..at]), cut(&fast, &text.as_bytes()[at..])].concat();
                assert_eq!(parts, whole, "{text:?} cut at {at}");
            }
        }
    }
}

#[test]
fn any_expression_loses_nothing() {
    let pattern = Pattern::new(r"\p{N}+").unwrap();
    assert_eq!(cut(&pattern, b"ab12\xFF\xFFc3"), [&b"ab"[..], b"12", b"\xFF", b"\xFF", b"c", b"3"]);
    assert!(Pattern::new("(").is_err());
}
