//! Which segments to load before they are asked for. Pure: positions in, segments out.
//!
//! A stream is a place where reads went on where the last one ended. Several files may be read at once, so several streams
//! are followed; a read that fits none starts one in place of the one that was used longest ago. As soon as a stream has
//! crossed from one segment into the next, the window after it is loaded: as long as what was read so far, up to a
//! bound, so it doubles as long as the guess is right and costs at most as much as was needed when it is not. The
//! next window is asked for when half of the last one is consumed. Random reads start streams and never load anything.

/// Streams followed at a time, per image.
const STREAMS: usize = 8;
/// Longest window in bytes.
const WINDOW_BYTES_MAX: u64 = 4 << 20;
/// A read this far before or behind the expected place still belongs to the stream: the kernel sends several reads of
/// one stream at a time, and they overtake each other.
const SLACK_BYTES: u64 = 256 << 10;
/// At most this part of a stream's span may have been left out, else it is not a stream but a neighbourhood.
const DENSE_PART: u64 = 4;

#[derive(Debug, Clone, Copy)]
struct Stream {
    /// Where it began.
    start: u64,
    /// Where the next read is expected.
    next: u64,
    /// Bytes that were read.
    read: u64,
    /// End of what was asked for in advance.
    ahead: u64,
    used: u64,
}

/// A run of bytes to load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Window {
    /// First byte.
    pub(crate) start: u64,
    /// First byte behind it.
    pub(crate) end: u64,
}

/// See the head of this file.
#[derive(Debug, Default)]
pub(crate) struct ReadAhead {
    streams: Vec<Stream>,
    clock: u64,
}

impl ReadAhead {
    /// A read of `[offset, offset + len)` whose first byte lies in a segment that starts at `segment_start`; the bytes to
    /// load now.
    pub(crate) fn on_read(&mut self, offset: u64, len: u64, segment_start: u64) -> Option<Window> {
        self.clock += 1;
        let end = offset + len;
        let fits = |stream: &&mut Stream| {
            offset <= stream.next + SLACK_BYTES && stream.next <= offset + SLACK_BYTES
        };
        let Some(stream) = self.streams.iter_mut().find(fits) else {
            self.begin(offset, end);
            return None;
        };
        stream.used = self.clock;
        stream.start = stream.start.min(offset);
        stream.next = stream.next.max(end);
        stream.read += len;
        let span = stream.next - stream.start;
        let crossed = stream.start < segment_start;
        let dense = stream.read >= span - span / DENSE_PART;
        let window = stream.read.min(span).min(WINDOW_BYTES_MAX);
        stream.ahead = stream.ahead.max(stream.next);
        if !crossed || !dense || stream.ahead - stream.next > window / 2 {
            return None;
        }
        let target = stream.next + window;
        let wanted = Window {
            start: stream.ahead,
            end: target,
        };
        stream.ahead = target;
        (wanted.start < wanted.end).then_some(wanted)
    }

    fn begin(&mut self, offset: u64, end: u64) {
        let stream = Stream {
            start: offset,
            next: end,
            read: end - offset,
            ahead: end,
            used: self.clock,
        };
        if self.streams.len() < STREAMS {
            self.streams.push(stream);
        } else if let Some(oldest) = self.streams.iter_mut().min_by_key(|s| s.used) {
            *oldest = stream;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SEGMENT: u64 = 128 << 10;
    const READ: u64 = 64 << 10;

    fn feed(ahead: &mut ReadAhead, offset: u64) -> Option<Window> {
        ahead.on_read(offset, READ, offset - offset % SEGMENT)
    }

    #[test]
    fn a_sequential_reader_is_kept_ahead_with_doubling_windows() {
        let mut ahead = ReadAhead::default();
        let base = 10 * SEGMENT;
        let windows: Vec<_> = (0..64)
            .filter_map(|n| feed(&mut ahead, base + n * READ))
            .collect();
        assert_eq!(windows[0].start, base + 3 * READ);
        assert_eq!(windows[0].end, base + 6 * READ);
        for pair in windows.windows(2) {
            assert_eq!(pair[0].end, pair[1].start);
        }
        let read = 64 * READ;
        let loaded = windows.last().unwrap().end - base;
        assert!(loaded >= read && loaded <= 2 * read, "{loaded} for {read}");
    }

    #[test]
    fn windows_are_bounded() {
        let mut ahead = ReadAhead::default();
        let longest = (0..2000)
            .filter_map(|n| feed(&mut ahead, n * READ))
            .map(|w| w.end - w.start)
            .max();
        assert!(longest.unwrap() <= WINDOW_BYTES_MAX);
    }

    #[test]
    fn random_reads_load_nothing() {
        let mut ahead = ReadAhead::default();
        let mut at: u64 = 1;
        for _ in 0..10_000 {
            at = at
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            let offset = (at >> 33) * 4096 % (1 << 36);
            assert_eq!(ahead.on_read(offset, 4096, offset - offset % SEGMENT), None);
        }
    }

    #[test]
    fn small_reads_in_one_neighbourhood_load_nothing() {
        let mut ahead = ReadAhead::default();
        for n in 0..200 {
            let offset = n * 50_000;
            assert_eq!(ahead.on_read(offset, 4096, offset - offset % SEGMENT), None);
        }
    }

    #[test]
    fn interleaved_streams_are_told_apart_and_overtaking_reads_belong_to_theirs() {
        let mut ahead = ReadAhead::default();
        let (a, b) = (0, 1 << 30);
        let mut windows = Vec::new();
        for n in [1_u64, 0, 3, 2, 5, 4, 7, 6] {
            windows.extend(feed(&mut ahead, a + n * READ));
            windows.extend(feed(&mut ahead, b + n * READ));
        }
        assert!(windows.iter().any(|w| w.start < b) && windows.iter().any(|w| w.start >= b));
        assert_eq!(ahead.streams.len(), 2);
    }
}
