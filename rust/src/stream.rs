//! Encoding a text that arrives in parts: the ids do not depend on where it is cut. What could still change waits.
//!
//! **Runs.** A long run of one white-space character must wait, as it is one pre-token whose end is not known; but not
//! all of it. Let c be the character, x₀ its token and xᵢ₊₁ = xᵢxᵢ while that is a merge; w is the last of them. In
//! whatever stands around the run, merges turn its inside into x₀x₀…, x₁x₁…, …, ww…: at each rank either every two
//! neighbours of the inside merge, from the left, or only its edges change, by one token at most. So for long runs
//! the ids are H w…w T, where H depends on what stands before the run, T on what follows and on the run's length
//! modulo that of w. H and all but the last of the w's are given out at once, and as many characters taken out of the run.

use crate::cache::Cache;
use crate::encode::{Model, Splitter};
use crate::ids::Ids;
use crate::pairs::NO_RANK;
use crate::pattern::{Failure, Pattern};
use crate::unicode::{class_before, SPACE};

/// Longest tokens of the vocabulary, end to end, that a shortened run still holds: far more than its edges reach.
const EDGE: usize = 64;

#[derive(Default)]
pub struct Stream {
    pending: Vec<u8>,
    /// Ids of `pending` that have been given out.
    given: usize,
    /// Not worth looking for a cut before this many bytes are there (doubled after a vain search: linear in total).
    patience: usize,
}

impl Stream {
    /// Takes a part and appends the ids that are certain by now.
    pub fn feed(
        &mut self,
        model: &Model,
        by: &Splitter,
        part: &[u8],
        cache: &mut Cache,
        out: &mut Ids,
    ) -> Result<(), Failure> {
        self.pending.extend_from_slice(part);
        if self.pending.len() < self.patience {
            return Ok(());
        }
        let Some(at) = by.cutter.last_cut(&self.pending) else {
            self.shorten_run(model, by, cache, out)?;
            self.patience = self.pending.len() * 2;
            return Ok(());
        };
        let result = self.give(at, model, by, cache, out);
        self.pending.drain(..at);
        (self.given, self.patience) = (0, 0);
        result
    }

    /// Bytes that wait.
    pub fn held(&self) -> usize {
        self.pending.len()
    }

    /// The rest of the ids.
    pub fn finish(&mut self, model: &Model, by: &Splitter, cache: &mut Cache, out: &mut Ids) -> Result<(), Failure> {
        let result = self.give(self.pending.len(), model, by, cache, out);
        *self = Stream::default();
        result
    }

    /// Appends the ids of the first `length` bytes of `pending`, but for those that were given out.
    fn give(
        &self,
        length: usize,
        model: &Model,
        by: &Splitter,
        cache: &mut Cache,
        out: &mut Ids,
    ) -> Result<(), Failure> {
        if self.given == 0 {
            return model.encode(&self.pending[..length], by, cache, out);
        }
        let mut ids = Ids::new(model.wide());
        model.encode(&self.pending[..length], by, cache, &mut ids)?;
        ids.iter().skip(self.given).for_each(|id| out.push(id));
        Ok(())
    }

    /// Shortens the run of one white-space character at the end of `pending`, if there is a long one.
    fn shorten_run(&mut self, model: &Model, by: &Splitter, cache: &mut Cache, out: &mut Ids) -> Result<(), Failure> {
        let Some(&byte @ (b' ' | b'\t'..=b'\r')) = self.pending.last() else { return Ok(()) };
        let start = self.pending.iter().rposition(|&other| other != byte).map_or(0, |at| at + 1);
        let (run, edge) = (self.pending.len() - start, EDGE * model.longest());
        let known = model.ordered && !matches!(by.cutter.pattern, Pattern::Other(_));
        // Where other white space stands before the run, what follows may decide how that is cut.
        let alone = start == 0 || class_before(&self.pending, start) != SPACE;
        if run < 4 * edge || !known || !alone || by.cutter.specials.hold(byte) {
            return Ok(());
        }
        let mut unit = model.byte_ids[byte as usize];
        while model.rank(unit, unit) != NO_RANK {
            unit = model.merged[model.rank(unit, unit) as usize];
        }
        let mut ids = Ids::new(model.wide());
        model.encode(&self.pending, by, cache, &mut ids)?;
        let ids: Vec<u32> = ids.iter().collect();
        let mut end = start;
        let head = ids.iter().position(|&id| {
            end += model.span(id);
            id == unit && end > start + edge
        });
        let Some(head) = head else { return Ok(()) };
        let units = ids[head..].iter().take_while(|&&id| id == unit).count();
        let taken = units.saturating_sub(edge / model.span(unit));
        ids[self.given..head + taken].iter().for_each(|&id| out.push(id));
        self.given = head; // the head stays where it is, whenever the run is shortened
        self.pending.truncate(self.pending.len() - taken * model.span(unit));
        Ok(())
    }
}
