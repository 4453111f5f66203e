use super::*;

fn cut(names: &[&str], text: &str) -> Vec<String> {
    let specials = Specials::new(&names.iter().map(|n| n.as_bytes().to_vec()).collect::<Vec<_>>()).unwrap();
    let mut found = Vec::new();
    specials.split(
        text.as_bytes(),
        &mut found,
        |found, segment| found.push(String::from_utf8(segment.to_vec()).unwrap()),
        |found, index| found.push(format!("#{index}")),
    );
    found
}

#[test]
fn longest_first_and_no_pattern() {
    assert_eq!(cut(&["<e>", "<e><e>"], "a<e><e><e>b"), ["a", "#1", "#0", "b"]);
    assert_eq!(cut(&["a+", ".*"], "aaa+.*"), ["aa", "#0", "#1"]);
    assert_eq!(cut(&[], "abc"), ["abc"]);
    assert_eq!(cut(&["x"], "xx"), ["#0", "#0"]);
    assert_eq!(cut(&["ab", "bcd"], "abcd"), ["#0", "cd"]);
    assert_eq!(cut(&["x"], ""), [""; 0]);
}

#[test]
fn no_cut_inside_a_special_token() {
    let specials = Specials::new(&[b"<end of text>".to_vec()]).unwrap();
    let text = b"ab<end of text>cd";
    let cuts: Vec<usize> = (0..=text.len()).filter(|&at| specials.is_cut(text, at, |_, _| true)).collect();
    assert_eq!(cuts, [1, 2, 15, 16]);
}
