use super::*;
use std::collections::HashMap;

pub fn table(words: &WordTable) -> HashMap<Vec<u8>, u64> {
    let mut found = HashMap::new();
    words.for_each(|word, count| assert!(found.insert(word.to_vec(), count).is_none()));
    found
}

const TEXT: &str = "It's a dog. <|end|>The dog's 2nd   day\n\n中文 中文<|end|> it's\u{3000}over <|end|";

fn shared(specials: &[&[u8]], replace: bool, most_bytes: usize, threads: usize) -> Shared {
    let specials: Vec<Vec<u8>> = specials.iter().map(|name| name.to_vec()).collect();
    let rules = Rules { replace, most_bytes, prune: false };
    Shared::new(Cutter::new("gpt2", &specials).unwrap(), rules, threads)
}

#[test]
fn blocks_of_any_size_count_alike() {
    let shared = shared(&[b"<|end|>", b"dog. <"], false, usize::MAX, 1);
    let mut whole = Counted::default();
    whole.add_block(TEXT.as_bytes(), &shared).unwrap();
    for size in 1..TEXT.len() {
        let mut parts = Counted::default();
        let mut start = 0;
        for end in block_ends(TEXT.as_bytes(), size, &shared.cutter) {
            parts.add_block(&TEXT.as_bytes()[start..end], &shared).unwrap();
            start = end;
        }
        assert_eq!(table(&parts.words), table(&whole.words), "block size {size}");
    }
}

#[test]
fn ill_formed_text_stops_or_is_replaced() {
    let mut counted = Counted::default();
    let strict = shared(&[], false, usize::MAX, 1);
    assert_eq!(counted.add_block(b"ab\xFFcd", &strict), Err(BlockError::IllFormed(2)));
    let mut counted = Counted::default();
    counted.add_block(b"ab\xFF\xE4\xB8cd", &shared(&[], true, usize::MAX, 1)).unwrap();
    assert_eq!(counted.replaced, 2);
    assert_eq!(table(&counted.words)["\u{FFFD}\u{FFFD}".as_bytes()], 1);
}

#[test]
fn files_are_counted_on_any_number_of_threads() {
    let directory = std::env::temp_dir().join(format!("groundup-count-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let paths: Vec<PathBuf> = (0..3).map(|i| directory.join(format!("{i}.txt"))).collect();
    std::fs::write(&paths[0], TEXT.repeat(30_000)).unwrap();
    std::fs::write(&paths[1], "").unwrap();
    std::fs::write(&paths[2], TEXT).unwrap();
    let run = |paths: &[PathBuf], threads, most_bytes| {
        let shared = shared(&[b"<|end|>"], false, most_bytes, threads);
        count_files(paths, &shared)?;
        let total = shared.total();
        Ok((total.bytes, table(&total.words)))
    };
    let one = run(&paths, 1, usize::MAX).unwrap();
    assert_eq!(one.0, 30_001 * TEXT.len() as u64);
    // The bound of the last is that of the first table: each thread has a third of it, so none keeps its words for long.
    for (threads, most_bytes) in [(0, usize::MAX), (3, usize::MAX), (3, WordTable::default().weight())] {
        assert_eq!(run(&paths, threads, most_bytes).unwrap(), one);
    }
    assert!(matches!(run(&paths, 3, 1 << 16), Err(CountError::Block(_, _, BlockError::Full))));
    let bad = directory.join("bad.txt");
    let mut text = TEXT.repeat(60_000).into_bytes();
    text.extend(b"\xFF");
    text.extend(TEXT.repeat(60_000).into_bytes());
    text.extend(b"\xFF");
    std::fs::write(&bad, text).unwrap();
    let place = match run(&[paths[0].clone(), bad], 3, usize::MAX) {
        Err(CountError::Block(file, offset, BlockError::IllFormed(at))) => (file, offset + at as u64),
        _ => panic!("an error was due"),
    };
    assert_eq!(place, (1, 60_000 * TEXT.len() as u64));
    assert!(matches!(run(&[directory.join("none")], 1, usize::MAX), Err(CountError::Unreadable(0, _))));
    std::fs::remove_dir_all(directory).unwrap();
}

#[test]
fn a_text_without_a_cut_can_be_stopped_within() {
    let shared = Shared::new(Cutter::new(r"\w+ ", &[]).unwrap(), shared(&[], false, usize::MAX, 1).rules, 1);
    shared.cancel.store(true, Ordering::Relaxed);
    let (mut counted, text) = (Counted::default(), b"word ".repeat(100_000));
    assert_eq!(counted.add_block(&text, &shared), Err(BlockError::Cancelled));
    assert!((TELL as u64..2 * TELL as u64).contains(&shared.done.load(Ordering::Relaxed)));
}
