use super::*;

#[test]
fn holds_what_it_was_given() {
    let mut table = PairTable::with_capacity(0);
    for i in 0..5000u32 {
        assert_eq!(table.get_or_insert(i % 70, i / 70, i), i);
    }
    for i in 0..5000u32 {
        assert_eq!(table.get_or_insert(i % 70, i / 70, 0), i);
        assert_eq!(table.get(i % 70, i / 70), Some(i));
    }
    assert_eq!(table.get(70, 1), None);
}
