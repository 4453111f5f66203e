//! Properties on random input (proptest), for as many seconds as `FUZZ_SECONDS` says, or one.
//!
//! Held against each other: the scanners and the regex engine; safe cuts, streams, fed parts and the whole text; the merges
//! of a piece, a training and their definitions.

use std::sync::Arc;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use crate::cache::Cache;
use crate::count::{Counted, Rules, Shared};
use crate::encode::{Model, Splitter};
use crate::feed::Feeder;
use crate::ids::Ids;
use crate::pattern::{Cutter, Pattern};
use crate::stream::Stream;

/// Runs a property on values of a strategy until the time is up.
fn hold<S: Strategy>(strategy: S, property: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let seconds = std::env::var("FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut cases = 0;
    while Instant::now() < end {
        let config = Config { cases: 200, failure_persistence: None, ..Config::default() };
        TestRunner::new(config).run(&strategy, &property).unwrap_or_else(|error| panic!("{error}"));
        cases += 200;
    }
    println!("{cases} cases");
}

/// Text in which everything that patterns look at is frequent.
fn text(parts: usize) -> impl Strategy<Value = String> {
    let trap = prop::sample::select(vec![
        "a",
        "S",
        "t",
        "re",
        "VE",
        "ll",
        "'",
        "'",
        "ſ",
        " ",
        " ",
        "  ",
        "\t",
        "\n",
        "\r",
        "\r\n",
        "1",
        "234",
        ".",
        "((",
        "中",
        "𝐀",
        "𝟏",
        "\u{3000}",
        "é",
        "e\u{301}",
        "٣",
        "Ⅷ",
        "\u{85}",
        "\u{A0}",
        "\u{2028}",
        "😀",
        "\u{200D}",
        "\0",
        "ǅ",
        "<|end|>",
        "some words",
        "                ",
    ]);
    let part = prop_oneof![6 => trap.prop_map(String::from), 1 => any::<char>().prop_map(String::from)];
    vec(part, 0..parts).prop_map(|parts| parts.concat())
}

fn pieces(pattern: &Pattern, text: &[u8]) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    let each = |bounds: &[usize]| {
        found.extend(bounds.windows(2).map(|piece| text[piece[0]..piece[1]].to_vec()));
        true
    };
    pattern.for_each_batch(text, each).unwrap();
    found.retain(|piece| !piece.is_empty());
    found
}

#[test]
fn scanners_equal_the_engine_and_cuts_change_nothing() {
    let expressions = [
        ("gpt2", r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"),
        (
            "cl100k",
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s",
        ),
        (
            "llama3",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
    ];
    let pairs = expressions.map(|(name, regex)| (Pattern::new(name).unwrap(), Pattern::new(regex).unwrap(), regex));
    // The engine knows an older Unicode: characters on whose class the two disagree are left out.
    let class = |regex: &str| fancy_regex::Regex::new(regex).unwrap();
    let (letter, number, space) = (class(r"\A\p{L}\z"), class(r"\A\p{N}\z"), class(r"\A\s\z"));
    let known = move |c: char| {
        let is = |regex: &fancy_regex::Regex| regex.is_match(c.encode_utf8(&mut [0; 4])).unwrap();
        let class = if is(&letter) {
            1
        } else if is(&number) {
            2
        } else if is(&space) {
            3
        } else {
            0
        };
        class == crate::unicode::class_of(c as u32)
    };
    hold(text(120), |text| {
        let text: String = text.chars().filter(|&c| c.is_ascii() || known(c)).collect();
        for (fast, engine, _) in pairs.iter() {
            let whole = pieces(fast, text.as_bytes());
            prop_assert_eq!(&whole, &pieces(engine, text.as_bytes()));
            for at in (1..text.len()).filter(|&at| fast.is_safe_cut(text.as_bytes(), at)) {
                let (left, right) = text.as_bytes().split_at(at);
                prop_assert_eq!(&[pieces(fast, left), pieces(fast, right)].concat(), &whole);
            }
        }
        Ok(())
    });
}

/// A vocabulary from choices of two parts for each merge, and its splitter.
fn model(choices: &[(u8, u8)], pattern: &str, specials: &[Vec<u8>]) -> (Model, Splitter) {
    let seeds = [b' ', b'a', b'\n', b'1', 0xE4, 0xB8, 0xF0, 0x9D, 0x90];
    let mut tokens: Vec<Option<Vec<u8>>> = (0..=255u8).map(|byte| Some(vec![byte])).collect();
    let mut merges = Vec::new();
    for &(left, right) in choices {
        let pick = |choice: u8| match choice as usize % (seeds.len() + tokens.len() - 256) {
            small if small < seeds.len() => seeds[small] as u32,
            made => (256 + made - seeds.len()) as u32,
        };
        let (left, right) = (pick(left), pick(right));
        let made = [tokens[left as usize].clone().unwrap(), tokens[right as usize].clone().unwrap()].concat();
        if made.len() <= 40 && !tokens.contains(&Some(made.clone())) {
            merges.push((left, right, merges.len() as u32));
            tokens.push(Some(made));
        }
    }
    let merged = (256..tokens.len() as u32).collect();
    let special_ids: Vec<u32> = (tokens.len() as u32..).take(specials.len()).collect();
    tokens.extend(specials.iter().cloned().map(Some));
    let model = Model::new(&tokens, &merges, merged, &special_ids, false).unwrap();
    (model, Splitter { cutter: Cutter::new(pattern, specials).unwrap(), special_ids })
}

fn encoded(model: &Model, by: &Splitter, text: &[u8]) -> Vec<u32> {
    let mut ids = Ids::new(false);
    model.encode(text, by, &mut Cache::default(), &mut ids).unwrap();
    ids.iter().collect()
}

#[test]
fn encoding_equals_the_definition_wherever_the_text_is_cut() {
    let choices = vec((any::<u8>(), any::<u8>()), 0..30);
    let run = (prop::sample::select(vec![" ", "\n", "\t", "a", ""]), 0..40_000usize);
    let part = prop_oneof![1..8usize, 1..5000usize];
    let strategy = (choices, 0..3usize, text(30), run, text(10), part, any::<bool>());
    hold(strategy, |(choices, pattern, before, (run, length), after, part, with_special)| {
        let specials: &[Vec<u8>] = if with_special { &[b"<|end|>".to_vec()] } else { &[] };
        let (model, by) = model(&choices, ["gpt2", "cl100k", "llama3"][pattern], specials);
        let short = format!("{before}{after}");
        let mut expected = Vec::new();
        let ordinary = |expected: &mut Vec<u32>, segment: &[u8]| {
            let found = pieces(&by.cutter.pattern, segment);
            expected.extend(found.iter().flat_map(|piece| crate::encode::tests::plain(&model, piece)));
        };
        let special = |expected: &mut Vec<u32>, index| expected.push(by.special_ids[index]);
        by.cutter.specials.split(short.as_bytes(), &mut expected, ordinary, special);
        prop_assert_eq!(encoded(&model, &by, short.as_bytes()), expected);
        let long = format!("{before}{}{after}", run.repeat(length));
        let whole = encoded(&model, &by, long.as_bytes());
        prop_assert_eq!(&model.decode(&whole).unwrap(), long.as_bytes());
        let (mut stream, mut ids, mut cache) = (Stream::default(), Ids::new(false), Cache::default());
        // What follows the run begins a part: so the run may have been cut just before.
        let (left, right) = long.as_bytes().split_at(long.len() - after.len());
        for part in left.chunks(part).chain(right.chunks(part)) {
            stream.feed(&model, &by, part, &mut cache, &mut ids).unwrap();
        }
        stream.finish(&model, &by, &mut cache, &mut ids).unwrap();
        prop_assert_eq!(ids.iter().collect::<Vec<u32>>(), whole);
        Ok(())
    });
}

#[test]
fn training_equals_the_definition_and_fed_parts_count_alike() {
    let words = prop::collection::btree_map(vec(prop::sample::select(b"abc".to_vec()), 1..30), 1..9u64, 1..30);
    hold((words, text(60), 1..50usize, 1..4usize), |(words, text, part, threads)| {
        prop_assert_eq!(crate::train::tests::fast(&words, 50), crate::train::tests::plain(&words, 50));
        let cutter = Cutter::new("gpt2", &[b"<|end|>".to_vec()]).unwrap();
        let rules = Rules { replace: false, most_bytes: usize::MAX, prune: false };
        let (shared, mut whole) = (Arc::new(Shared::new(cutter, rules, threads)), Counted::default());
        whole.add_block(text.as_bytes(), &shared).unwrap();
        let mut feeder = Feeder::new(Arc::clone(&shared), part);
        for part in text.as_bytes().chunks(part) {
            feeder.feed(part).unwrap();
        }
        feeder.finish().unwrap();
        prop_assert_eq!(crate::count::tests::table(&shared.total().words), crate::count::tests::table(&whole.words));
        Ok(())
    });
}
