use super::*;
use std::collections::HashMap;

pub fn table(words: &WordTable) -> HashMap<Vec<u8>, u64> {
    let mut found = HashMap::new();
    words.for_each(|word, count| assert!(found.insert(word.to_vec(), count).is_none()));
    found
}

const TEXT: &str = "It's a dog. <|end|>The dog's 2nd   day\n\n中文 中文<|end|> it's\u{3000}over <|end|";

#[test]
fn blocks_of_any_size_count_alike() {
    let cutter = Cutter::new("gpt2", &[b"<|end|>".to_vec(), b"dog. <".to_vec()]).unwrap();
    let mut whole = Counted::default();
    whole.add_block(TEXT.as_bytes(), &cutter, STRICT).unwrap();
    for size in 1..TEXT.len() {
        let mut parts = Counted::default();
        let mut start = 0;
        for end in block_ends(TEXT.as_bytes(), size, &cutter) {
            parts.add_block(&TEXT.as_bytes()[start..end], &cutter, STRICT).unwrap();
            start = end;
        }
        assert_eq!(table(&parts.words), table(&whole.words), "block size {size}");
    }
}

#[test]
fn ill_formed_text_stops_or_is_replaced() {
    let cutter = Cutter::new("gpt2", &[]).unwrap();
    let mut counted = Counted::default();
    assert_eq!(counted.add_block(b"ab\xFFcd", &cutter, STRICT), Err(BlockError::IllFormed(2)));
    let mut counted = Counted::default();
    counted.add_block(b"ab\xFF\xE4\xB8cd", &cutter, Rules { replace: true, ..STRICT }).unwrap();
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
    let cutter = Cutter::new("gpt2", &[b"<|end|>".to_vec()]).unwrap();
    let run = |paths: &[PathBuf], threads| {
        count_files(paths, &cutter, STRICT, threads, &AtomicU64::new(0), &AtomicBool::new(false))
    };
    let one = run(&paths, 1).unwrap();
    let three = run(&paths, 3).unwrap();
    assert_eq!(one.bytes, 30_001 * TEXT.len() as u64);
    assert_eq!((three.bytes, table(&three.words)), (one.bytes, table(&one.words)));
    let bad = directory.join("bad.txt");
    let mut text = TEXT.repeat(60_000).into_bytes();
    text.extend(b"\xFF");
    text.extend(TEXT.repeat(60_000).into_bytes());
    text.extend(b"\xFF");
    std::fs::write(&bad, text).unwrap();
    let place = match run(&[paths[0].clone(), bad], 3) {
        Err(CountError::IllFormed(file, offset)) => (file, offset),
        _ => panic!("an error was due"),
    };
    assert_eq!(place, (1, 60_000 * TEXT.len() as u64));
    assert!(matches!(run(&[directory.join("none")], 1), Err(CountError::Unreadable(0, _))));
    std::fs::remove_dir_all(directory).unwrap();
}
