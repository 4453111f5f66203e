use crate::cache::Cache;
use crate::encode::{is_ordered, Model, Splitter};
use crate::ids::Ids;
use crate::merge::Work;
use crate::pairs::NO_RANK;
use crate::pattern::Cutter;
use crate::stream::Stream;

/// A model over a, b and c with a few merges, some of which overlap themselves.
fn model() -> (Model, Splitter) {
    let mut tokens: Vec<Option<Vec<u8>>> = (0..=255u8).map(|byte| Some(vec![byte])).collect();
    let mut merges = Vec::new();
    for (left, right) in
        [("a", "a"), ("a", "b"), ("aa", "aa"), ("b", "c"), ("aa", "ab"), (" ", "a"), ("aaaa", "a"), ("bc", "bc")]
    {
        let find = |name: &str| tokens.iter().position(|t| t.as_deref() == Some(name.as_bytes())).unwrap() as u32;
        merges.push((find(left), find(right), merges.len() as u32));
        tokens.push(Some([left.as_bytes(), right.as_bytes()].concat()));
    }
    let merged = (256..tokens.len() as u32).collect();
    let specials = [b"<e>".to_vec(), b"<e><e>".to_vec()];
    let special_ids = vec![tokens.len() as u32, tokens.len() as u32 + 1];
    tokens.extend(specials.iter().map(|special| Some(special.clone())));
    let model = Model::new(&tokens, &merges, merged, &special_ids, false).unwrap();
    (model, Splitter { cutter: Cutter::new("gpt2", &specials).unwrap(), special_ids })
}

/// The definition: merge the leftmost pair of the lowest rank until there is none.
pub fn plain(model: &Model, piece: &[u8]) -> Vec<u32> {
    let mut ids: Vec<u32> = piece.iter().map(|&byte| model.byte_ids[byte as usize]).collect();
    loop {
        let ranked = ids.windows(2).enumerate().map(|(at, pair)| (model.rank(pair[0], pair[1]), at));
        match ranked.min() {
            Some((rank, at)) if rank != NO_RANK => {
                ids[at] = model.merged[rank as usize];
                ids.remove(at + 1);
            }
            _ => return ids,
        }
    }
}

fn random_text(state: &mut u64, length: usize) -> Vec<u8> {
    let mut text = Vec::new();
    while text.len() < length {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let parts: [&[u8]; 9] = [b"a", b"a", b"aa", b"b", b"c", b"bc", b" ", b"<e>", "中".as_bytes()];
        text.extend(parts[(*state >> 33) as usize % parts.len()]);
    }
    text
}

#[test]
fn pieces_equal_the_definition_at_any_length() {
    let ((model, _), mut state) = (model(), 3);
    for round in 0..600 {
        let piece = random_text(&mut state, 1 + round % 150);
        let expected = plain(&model, &piece);
        let check = |encode: &dyn Fn(&mut Work, &mut Ids)| {
            let (mut work, mut ids) = (Work::default(), Ids::new(round % 2 == 0));
            encode(&mut work, &mut ids);
            assert_eq!(ids.iter().collect::<Vec<u32>>(), expected);
        };
        check(&|work, ids| model.encode_piece(&piece, work, ids));
        if piece.len() > 1 {
            check(&|work, ids| model.encode_long(&piece, work, ids));
            check(&|_, ids| model.encode_very_long(&piece, ids));
        }
    }
}

#[test]
fn knows_whether_merges_are_ordered() {
    assert!(model().0.ordered);
    assert!(is_ordered(5, &[(0, 1, 0), (2, 0, 1)], &[2, 3]));
    assert!(!is_ordered(5, &[(2, 0, 0), (0, 1, 1)], &[3, 2]));
    assert!(!is_ordered(5, &[(0, 1, 0), (2, 0, 1), (1, 1, 2)], &[2, 3, 2]));
}

#[test]
fn streams_give_the_same_ids_wherever_they_are_cut() {
    let ((model, by), mut state, mut cache) = (model(), 5, Cache::default());
    for _ in 0..60 {
        let text = random_text(&mut state, 40);
        let mut whole = Ids::new(false);
        model.encode(&text, &by, &mut cache, &mut whole).unwrap();
        let whole = whole.iter().collect::<Vec<u32>>();
        assert_eq!(model.decode(&whole).unwrap(), text);
        for size in 1..text.len() {
            let (mut stream, mut ids) = (Stream::default(), Ids::new(false));
            for part in text.chunks(size) {
                stream.feed(&model, &by, part, &mut cache, &mut ids).unwrap();
            }
            stream.finish(&model, &by, &mut cache, &mut ids).unwrap();
            assert_eq!(
                ids.iter().collect::<Vec<u32>>(),
                whole,
                "{:?} in parts of {size}",
                String::from_utf8_lossy(&text)
            );
        }
    }
}

/// Runs of one white-space character are cut short, with the same ids.
#[test]
fn runs_are_shortened_without_a_trace() {
    let mut state = 11u64;
    let mut next = |bound: usize| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 33) as usize % bound
    };
    for round in 0..300 {
        // Random merges over three bytes, most of them of spaces.
        let mut tokens: Vec<Option<Vec<u8>>> = (0..=255u8).map(|byte| Some(vec![byte])).collect();
        let mut merges = Vec::new();
        for _ in 0..3 + next(9) {
            let mut pick = || match next(3 + tokens.len() - 256) {
                0 | 1 => b' ' as u32,
                2 => [b'a', b'\n'][round % 2] as u32,
                made => 253 + made as u32,
            };
            let (left, right) = (pick(), pick());
            let made = [tokens[left as usize].clone().unwrap(), tokens[right as usize].clone().unwrap()].concat();
            if made.len() <= 24 && !tokens.contains(&Some(made.clone())) {
                merges.push((left, right, merges.len() as u32));
                tokens.push(Some(made));
            }
        }
        let merged = (256..tokens.len() as u32).collect();
        let model = Model::new(&tokens, &merges, merged, &[], false).unwrap();
        let by = Splitter {
            cutter: Cutter::new(["gpt2", "cl100k", "llama3"][round % 3], &[]).unwrap(),
            special_ids: vec![],
        };
        let (mut text, length) = (["", "a", ")", "'", "\n"][next(5)].as_bytes().to_vec(), 10_000 + next(200));
        text.extend(std::iter::repeat_n(b' ', length));
        let run_end = text.len();
        text.extend(["", "a", "\n", "\n\n a", ")"][next(5)].as_bytes());
        let (mut cache, mut whole) = (Cache::default(), Ids::new(false));
        model.encode(&text, &by, &mut cache, &mut whole).unwrap();
        let (mut stream, mut ids, mut held) = (Stream::default(), Ids::new(false), 0);
        // What follows the run comes alone: so the run may have been cut just before.
        let size = 1 + next(700);
        for part in text[..run_end].chunks(size).chain([&text[run_end..]]) {
            stream.feed(&model, &by, part, &mut cache, &mut ids).unwrap();
            held = held.max(stream.held());
        }
        stream.finish(&model, &by, &mut cache, &mut ids).unwrap();
        let differ = ids.iter().zip(whole.iter()).position(|(a, b)| a != b);
        let (found, wanted) = (ids.iter().len(), whole.iter().len());
        assert!(
            differ.is_none() && found == wanted,
            "{merges:?} {length} from {differ:?}: {found} ids, not {wanted}, {:?} at the end, parts of {size}, round {round}",
            String::from_utf8_lossy(&text[run_end..])
        );
        if model.ordered && text[0] != b'\n' && model.longest() < 8 {
            assert!(held < 6_000, "{held} bytes were held back");
        }
    }
}

#[test]
fn unknown_ids_and_missing_bytes_are_errors() {
    assert_eq!(model().0.decode(&[97u32, 9999]), Err(9999));
    assert!(Model::new(&[Some(b"a".to_vec())], &[], vec![], &[], false).is_err_and(|error| error.contains("0x00")));
}
