use super::*;
use std::collections::BTreeMap;

pub fn fast(words: &BTreeMap<Vec<u8>, u64>, wanted: usize) -> Merges {
    let mut table = WordTable::default();
    for (word, &count) in words {
        table.add(word, 0, word.len(), count);
    }
    Trainer::new(&table, Ties::Greatest).unwrap().run(wanted, &mut |_| true).unwrap()
}

/// The definition: words as lists of byte strings, all pairs counted before every merge.
pub fn plain(words: &BTreeMap<Vec<u8>, u64>, wanted: usize) -> Merges {
    let mut lists: Vec<(Vec<Vec<u8>>, u64)> =
        words.iter().map(|(word, &count)| (word.iter().map(|&b| vec![b]).collect(), count)).collect();
    let mut merges = Merges::new();
    while merges.len() < wanted {
        let mut counts: BTreeMap<(Vec<u8>, Vec<u8>), u64> = BTreeMap::new();
        for (word, count) in &lists {
            for pair in word.windows(2) {
                *counts.entry((pair[0].clone(), pair[1].clone())).or_insert(0) += count;
            }
        }
        let Some((best, _)) = counts.into_iter().max_by(|x, y| x.1.cmp(&y.1).then(x.0.cmp(&y.0))) else { break };
        for (word, _) in &mut lists {
            let mut at = 0;
            while at + 1 < word.len() {
                if word[at] == best.0 && word[at + 1] == best.1 {
                    word[at] = [best.0.clone(), best.1.clone()].concat();
                    word.remove(at + 1);
                }
                at += 1;
            }
        }
        merges.push(best);
    }
    merges
}

#[test]
fn equals_the_definition_on_random_words() {
    let mut state = 7u64;
    let mut next = |bound: u64| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) % bound
    };
    let mut check = |words: u64, size: u64, letters: u64, most: u64| {
        let mut word = || (0..1 + next(size)).map(|_| b'a'.wrapping_add(next(letters) as u8)).collect();
        let words: BTreeMap<Vec<u8>, u64> = (0..words).map(|number| (word(), 1 + number % most)).collect();
        assert_eq!(fast(&words, 60), plain(&words, 60), "{words:?}");
    };
    for round in 0..400 {
        check(1 + round % 30, 24, 1 + round % 4, 5);
    }
    check(1000, 16, 100, 1); // most pairs occur once: they are not remembered in the first round
}

#[test]
fn counts_beyond_32_bits() {
    let words = BTreeMap::from([
        (b"xy".to_vec(), 1 << 33),
        (b"xz".to_vec(), 3 << 31),
        (b"zx".to_vec(), u32::MAX as u64),
        (b"zzzzz".to_vec(), 1),
    ]);
    assert_eq!(fast(&words, 9), plain(&words, 9));
}

#[test]
fn one_long_word_is_not_quadratic() {
    let words = BTreeMap::from([(vec![b'a'; 1_000_000], 1)]);
    let merges = fast(&words, 40);
    assert_eq!(merges[3], (vec![b'a'; 8], vec![b'a'; 8]));
}

#[test]
fn cancels() {
    let mut table = WordTable::default();
    table.add(b"abcabc", 0, 6, 1);
    assert_eq!(Trainer::new(&table, Ties::Greatest).unwrap().run(9, &mut |done| done < 2), Err(TrainError::Cancelled));
}

#[test]
fn memory_grows_with_the_merges_made_not_with_those_wanted() {
    let words = BTreeMap::from([(b"ab".to_vec(), 1)]);
    assert_eq!(fast(&words, usize::MAX), [(b"a".to_vec(), b"b".to_vec())]);
}
