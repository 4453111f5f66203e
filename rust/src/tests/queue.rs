use super::*;

#[test]
fn ties_go_to_the_greater_pair_not_the_greater_concatenation() {
    let mut symbols = Symbols::default();
    for bytes in [&b"a"[..], b"ab", b"b", b"bc", b"abcdefghi", b"abcdefghj", b"a\0"] {
        symbols.push(bytes.into());
    }
    let mut queue = Queue::default();
    let pairs = [(0, 3), (1, 0), (0, 2), (4, 0), (5, 0), (6, 0), (2, 2)];
    for (pair, &(left, right)) in pairs.iter().enumerate() {
        queue.push(Candidate { count: 7 + (pair == 6) as i64, left, right, pair: pair as u32 }, &symbols);
    }
    let order: Vec<u32> = std::iter::from_fn(|| queue.pop(&symbols)).map(|c| c.pair).collect();
    // Count 8 first; then ("abcdefghj", …), ("abcdefghi", …), ("ab", …), ("a\0", …), ("a", "bc"), ("a", "b").
    assert_eq!(order, [6, 4, 3, 1, 5, 0, 2]);
}
