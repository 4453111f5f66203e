use super::*;
use std::collections::HashMap;

#[test]
fn counts_like_a_map() {
    let text: Vec<u8> = (0..60_000u32).map(|i| (i.wrapping_mul(2654435761) >> 24) as u8).collect();
    let (mut table, mut other, mut truth) = (WordTable::default(), WordTable::default(), HashMap::new());
    let mut start = 0;
    for size in (1..=40).cycle() {
        let Some(word) = text.get(start..start + size) else { break };
        let count = size as u64 * 3_000_000_000;
        if start % 2 == 0 { &mut table } else { &mut other }.add(&text, start, start + size, count);
        *truth.entry(word.to_vec()).or_insert(0) += count;
        start += 1 + size % 3;
    }
    table.absorb(other);
    assert_eq!(table.len(), truth.len());
    let mut found = HashMap::new();
    table.for_each(|word, count| assert!(found.insert(word.to_vec(), count).is_none()));
    assert_eq!(found, truth);
    let all: u64 = truth.values().sum();
    let dropped = table.prune();
    assert!(table.len() <= truth.len() / 2);
    let mut left = 0;
    table.for_each(|word, count| left += if truth[word] == count { count } else { 0 });
    assert_eq!(left + dropped, all);
}

#[test]
fn words_of_zero_bytes_keep_their_length() {
    let mut table = WordTable::default();
    for size in 1..=20 {
        table.add(&[0; 32], 0, size, size as u64);
    }
    assert_eq!(table.len(), 20);
    table.for_each(|word, count| assert!(word.len() as u64 == count && word.iter().all(|&b| b == 0)));
}

#[test]
fn long_words_of_one_hash_are_told_apart() {
    // The first factor of the hash is 0 for these eight bytes, whatever follows.
    let word = |number: u64| [0x9E37_79B9_7F4A_7C15u64.to_le_bytes(), number.to_le_bytes()].concat();
    assert_eq!(mark_of(&word(1)), mark_of(&word(2)));
    let (mut table, mut other) = (WordTable::default(), WordTable::default());
    for number in 0..100 {
        table.add_batch(&word(number), &[0, 16]);
        other.add(&word(number), 0, 16, number);
    }
    table.absorb(other);
    assert_eq!(table.len(), 100);
    table.for_each(|found, count| assert_eq!(found, word(count - 1)));
}
