use super::*;

/// The definition, character by character: end of the piece that starts at `start`.
///
/// `start < text.len()`, at the start of a character. Ill-formed bytes count as OTHER.
fn piece_end(text: &[u8], start: usize) -> usize {
    let length = text.len();
    let first = text[start];
    if first == b'\'' {
        if let Some(end) = contraction_end(text, start) {
            return end;
        }
    }
    let (class, size) = class_at(text, start);
    if class != SPACE {
        return run_end(text, start + size, class);
    }
    if first == b' ' && start + 1 < length {
        let (next, size) = class_at(text, start + 1);
        if next != SPACE {
            return run_end(text, start + 1 + size, next);
        }
    }
    let (mut last, mut at) = (start, start + size);
    while at < length {
        let (class, size) = class_at(text, at);
        if class != SPACE {
            return if last == start { at } else { last };
        }
        last = at;
        at += size;
    }
    length
}

/// End of the run of `class` that goes on at `at`.
fn run_end(text: &[u8], mut at: usize, class: u8) -> usize {
    while at < text.len() {
        let (next, size) = class_at(text, at);
        if next != class {
            break;
        }
        at += size;
    }
    at
}

/// Calls `each(start, end)` for every piece of `text`.
fn for_each_piece(text: &[u8], mut each: impl FnMut(usize, usize)) {
    for_each_batch(text, |bounds| {
        bounds.windows(2).for_each(|piece| each(piece[0], piece[1]));
        true
    });
}

/// Random text over `alphabet`, of up to `parts` parts.
fn random_text(state: &mut u64, alphabet: &[&[u8]], parts: usize) -> Vec<u8> {
    let mut next = || {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (*state >> 33) as usize
    };
    (0..next() % (parts + 1)).flat_map(|_| alphabet[next() % alphabet.len()].to_vec()).collect()
}

const TRAPS: [&[u8]; 22] = [
    b"a",
    b"s",
    b"re",
    b"l",
    b"'",
    b"'",
    b" ",
    b" ",
    b"\n",
    b"1",
    b".",
    b"some letters",
    b"        ",
    b"\xFF",
    b"\xE4\xB8",
    "中".as_bytes(),
    "\u{3000}".as_bytes(),
    "\u{85}".as_bytes(),
    "é".as_bytes(),
    "\u{301}".as_bytes(),
    "😀".as_bytes(),
    "٣".as_bytes(),
];

#[test]
fn masks_equal_the_definition_at_every_offset_of_a_block() {
    let mut state = 1;
    for _ in 0..40_000 {
        let text = random_text(&mut state, &TRAPS, 120);
        let (mut start, mut expected) = (0, Vec::new());
        while start < text.len() {
            let end = piece_end(&text, start);
            expected.push((start, end));
            start = end;
        }
        let mut found = Vec::new();
        for_each_piece(&text, |start, end| found.push((start, end)));
        assert_eq!(found, expected, "{:?}", String::from_utf8_lossy(&text));
    }
}

#[test]
fn both_classifiers_of_ascii_agree() {
    for first in 0..=255u8 {
        let block: [u8; 64] = std::array::from_fn(|place| first.wrapping_add(place as u8));
        let (fast, plain) = (ascii_classes(&block), ascii_classes_plain(&block));
        let all = |c: Classes| [c.letter, c.number, c.space, c.blank, c.apostrophe, c.high];
        assert_eq!(all(fast), all(plain));
    }
}

fn pieces(text: &[u8]) -> Vec<&[u8]> {
    let mut found = Vec::new();
    for_each_piece(text, |start, end| found.push(&text[start..end]));
    found
}

fn cut(text: &str) -> Vec<String> {
    pieces(text.as_bytes()).into_iter().map(|p| String::from_utf8(p.to_vec()).unwrap()).collect()
}

#[test]
fn words_numbers_and_the_rest() {
    assert_eq!(cut("Hello, world 42!"), ["Hello", ",", " world", " 42", "!"]);
    assert_eq!(cut("a1b2 中文 ½"), ["a", "1", "b", "2", " 中文", " ½"]);
    assert_eq!(cut(""), [""; 0]);
}

#[test]
fn contractions_only_at_the_start_of_a_piece() {
    assert_eq!(cut("don't we'll I'VE"), ["don", "'t", " we", "'ll", " I", "'", "VE"]);
    assert_eq!(cut(" 't ''s 'same"), [" '", "t", " ''", "s", " '", "same"]);
    assert_eq!(cut("x'same'rest"), ["x", "'s", "ame", "'re", "st"]);
    assert_eq!(cut("'s's'l'"), ["'s", "'s", "'", "l", "'"]);
}

#[test]
fn white_space_gives_its_last_character_back() {
    assert_eq!(cut("a   b"), ["a", "  ", " b"]);
    assert_eq!(cut("a \n b"), ["a", " \n", " b"]);
    assert_eq!(cut("a\n\nb"), ["a", "\n", "\n", "b"]);
    assert_eq!(cut("a \u{3000}b  "), ["a", " ", "\u{3000}", "b", "  "]);
    assert_eq!(cut("\u{85}x \t"), ["\u{85}", "x", " \t"]);
}

#[test]
fn ill_formed_bytes_are_pieces_too() {
    assert_eq!(pieces(b"a\xFF\xFEb \xE4\xB8"), [&b"a"[..], b"\xFF\xFE", b"b", b" \xE4\xB8"]);
}

/// Random strings over an alphabet that holds every trap, cut at every place that claims to be safe.
#[test]
fn safe_cuts_change_nothing() {
    let (mut state, mut cuts) = (1, 0);
    for _ in 0..20_000 {
        let text = random_text(&mut state, &TRAPS, 14);
        let whole = pieces(&text);
        for at in 1..text.len() {
            if is_safe_cut(&text, at) {
                cuts += 1;
                let mut parts = pieces(&text[..at]);
                parts.extend(pieces(&text[at..]));
                assert_eq!(parts, whole, "{:?} cut at {at}", String::from_utf8_lossy(&text));
            }
        }
    }
    assert!(cuts > 50_000);
}
