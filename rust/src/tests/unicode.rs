use super::*;

#[test]
fn classes_of_known_characters() {
    for (character, class) in [
        ('a', LETTER),
        ('ſ', LETTER),
        ('中', LETTER),
        ('7', NUMBER),
        ('Ⅷ', NUMBER),
        ('½', NUMBER),
        (' ', SPACE),
        ('\u{85}', SPACE),
        ('\u{3000}', SPACE),
        ('\u{1C}', OTHER),
        ('_', OTHER),
        ('\u{301}', OTHER),
        ('\u{10FFFF}', OTHER),
    ] {
        assert_eq!(class_of(character as u32), class, "{character:?}");
    }
}

#[test]
fn decodes_every_character_and_no_ill_formed_sequence() {
    let mut buffer = [0; 4];
    for character in (0..0x110000).filter_map(char::from_u32) {
        let text = character.encode_utf8(&mut buffer).as_bytes();
        assert_eq!(decode(text, 0), (character as u32, text.len()));
        if text.len() > 1 {
            assert_eq!(decode(&text[..text.len() - 1], 0).1, 1);
        }
    }
    for bad in
        [&b"\xC0\x80"[..], b"\xED\xA0\x80", b"\xF4\x90\x80\x80", b"\xE0\x9F\xBF", b"\xF0\x8F\xBF\xBF", b"\x80", b"\xFF"]
    {
        assert_eq!(decode(bad, 0), (0xFFFD, 1));
    }
}
