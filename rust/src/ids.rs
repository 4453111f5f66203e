//! Ids as the bytes of an array: what the encoder writes, what its cache holds, and what Python gets without a copy.

use crate::words::want_large_pages;

/// Bytes that `Ids::put` writes at once: eight narrow ids or four wide ones.
pub const CHUNK: usize = 16;
pub type Chunk = [u64; 2];

/// A growing array of ids, each 2 bytes (vocabularies of at most 65,536 tokens) or 4, in the machine's order.
pub struct Ids {
    bytes: Vec<u8>,
    wide: bool,
}

impl Ids {
    pub fn new(wide: bool) -> Self {
        Ids { bytes: Vec::new(), wide }
    }

    /// With room for the ids of a text of `bytes` bytes, by experience; what stays unused is given back.
    pub fn for_text(bytes: usize, wide: bool) -> Self {
        let mut bytes = Vec::with_capacity((bytes / 2 + CHUNK) << (1 + wide as usize));
        want_large_pages(bytes.spare_capacity_mut());
        Ids { bytes, wide }
    }

    /// log2 of an id's bytes.
    #[inline]
    fn shift(&self) -> usize {
        1 + self.wide as usize
    }

    /// Makes room for `more` ids and for what `put` may write beyond them.
    #[inline]
    pub fn reserve(&mut self, more: usize) {
        self.bytes.reserve((more << self.shift()) + CHUNK);
    }

    /// Appends the first `size` bytes of `chunk`. There must be room for all of it.
    #[inline(always)]
    pub fn put(&mut self, chunk: Chunk, size: usize) {
        assert!(self.bytes.capacity() - self.bytes.len() >= CHUNK && size <= CHUNK);
        // SAFETY: the allocation has room for the 16 bytes that are written, and the new length ends within them.
        unsafe {
            self.bytes.as_mut_ptr().add(self.bytes.len()).cast::<Chunk>().write_unaligned(chunk.map(u64::to_le));
            self.bytes.set_len(self.bytes.len() + size);
        }
    }

    /// Appends `size` bytes. There must be room for whole chunks.
    #[inline]
    pub fn put_many(&mut self, chunks: &[Chunk], mut size: usize) {
        for &chunk in chunks {
            self.put(chunk, size.min(CHUNK));
            if size <= CHUNK {
                break;
            }
            size -= CHUNK;
        }
    }

    pub fn push(&mut self, id: u32) {
        match self.wide {
            true => self.bytes.extend_from_slice(&id.to_ne_bytes()),
            false => self.bytes.extend_from_slice(&(id as u16).to_ne_bytes()),
        }
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.bytes.chunks_exact(1 << self.shift()).map(|id| match *id {
            [a, b] => u16::from_ne_bytes([a, b]) as u32,
            [a, b, c, d] => u32::from_ne_bytes([a, b, c, d]),
            _ => 0,
        })
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub fn into_bytes(mut self) -> Vec<u8> {
        self.bytes.shrink_to_fit();
        self.bytes
    }
}
