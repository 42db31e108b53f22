//! Which part of a GPU's used memory is explained: by the driver, by the worker's context, by the
//! worker's data.
//!
//! A process in another container is in no list that NVML returns, but its memory counts as used.

/// Growth below this is not taken for a process: a context takes 0.3 to 0.6 GiB (BENCHMARKS.md),
/// own lazy allocations less.
// Source: this project's own choice, a tenth of a context.
pub const NOTICED_BYTES: u64 = 64 << 20;
/// The largest context of the worker that is believed; an excess belongs to foreign processes.
// Source: 0.55 GiB on an H200 (BENCHMARKS.md), and as much again for other models.
pub const CONTEXT_BYTES_MAXIMUM: u64 = 1 << 30;
/// Used memory of an idle GPU that is believed to be the driver's, where NVML separates the
/// reserved part, and where it does not.
// Source: NVML's `reserved` is 616 MiB on an H200; without that, the limit of the check
// `idle_memory`.
const IDLE_BYTES_MAXIMUM: u64 = 256 << 20;
const IDLE_BYTES_WITH_RESERVED_MAXIMUM: u64 = 1 << 30;

/// Used memory as NVML reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    pub bytes: u64,
    /// The driver's reserved memory is not part of it (`nvmlDeviceGetMemoryInfo_v2`).
    pub without_reserved: bool,
}

/// The worker's part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Own {
    /// There is no worker.
    Nothing,
    /// A context and this much data.
    Worker { data_bytes: u64 },
    /// It allocates, frees or ends: the sum is no evidence.
    Changing,
}

/// What is known of the explained part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryAccount {
    /// Without a worker.
    idle_bytes: Option<u64>,
    /// The worker's context, once it was seen.
    context_bytes: Option<u64>,
}

impl MemoryAccount {
    /// Notes a reading, and returns how much of it is not explained; `None` where the reading is no
    /// evidence.
    pub fn unexplained(&mut self, used: Used, own: Own) -> Option<u64> {
        match own {
            Own::Changing => None,
            Own::Nothing => {
                self.context_bytes = None;
                let limit = if used.without_reserved {
                    IDLE_BYTES_MAXIMUM
                } else {
                    IDLE_BYTES_WITH_RESERVED_MAXIMUM
                };
                let idle = self.idle_bytes.unwrap_or(limit).min(used.bytes);
                if used.bytes <= limit || self.idle_bytes.is_some() {
                    self.idle_bytes = Some(idle);
                }
                Some(noticed(used.bytes - idle))
            }
            Own::Worker { data_bytes } => {
                let idle = self.idle_bytes.unwrap_or_default();
                let beyond = used.bytes.saturating_sub(idle + data_bytes);
                let context = *self
                    .context_bytes
                    .get_or_insert_with(|| beyond.min(CONTEXT_BYTES_MAXIMUM));
                Some(noticed(beyond.saturating_sub(context)))
            }
        }
    }
}

fn noticed(bytes: u64) -> u64 {
    if bytes >= NOTICED_BYTES { bytes } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn used(mib: u64) -> Used {
        Used {
            bytes: mib * MIB,
            without_reserved: true,
        }
    }

    fn data(mib: u64) -> Own {
        Own::Worker {
            data_bytes: mib * MIB,
        }
    }

    #[test]
    fn a_newcomer_shows_beside_a_worker_whose_context_is_known() {
        let mut account = MemoryAccount::default();
        for (reading, own, unexplained) in [
            (used(3), Own::Nothing, Some(0)),
            (used(1000), Own::Changing, None),
            (used(3 + 550 + 2048), data(2048), Some(0)),
            (used(3 + 560 + 2048), data(2048), Some(0)),
            (used(3 + 550 + 2048 + 400), data(2048), Some(400)),
            // Data freed, context kept.
            (used(3 + 550), data(0), Some(0)),
            (used(3 + 550 + 400), data(0), Some(400)),
            (used(403), Own::Nothing, Some(400)),
            (used(3), Own::Nothing, Some(0)),
        ] {
            let found = account.unexplained(reading, own);
            assert_eq!(found, unexplained.map(|it| it * MIB), "{reading:?} {own:?}");
        }
    }

    #[test]
    fn a_gpu_that_is_used_from_the_beginning_is_not_idle() {
        let mut account = MemoryAccount::default();
        assert_eq!(
            account.unexplained(used(257), Own::Nothing),
            Some(0),
            "1 MiB is not noticed"
        );
        let mut account = MemoryAccount::default();
        assert!(account.unexplained(used(600), Own::Nothing) > Some(0));
        assert!(
            account.unexplained(used(600), Own::Nothing) > Some(0),
            "still not"
        );
        assert_eq!(account.unexplained(used(100), Own::Nothing), Some(0));
        // What was believed to be the driver's part shrinks and does not grow.
        assert_eq!(account.unexplained(used(170), Own::Nothing), Some(70 * MIB));
        let with_reserved = Used {
            without_reserved: false,
            ..used(900)
        };
        assert_eq!(
            MemoryAccount::default().unexplained(with_reserved, Own::Nothing),
            Some(0)
        );
    }

    #[test]
    fn a_context_larger_than_any_is_somebody_elses() {
        let mut account = MemoryAccount::default();
        account.unexplained(used(0), Own::Nothing);
        let found = account.unexplained(used(4096), data(1024));
        assert_eq!(found, Some(2048 * MIB));
    }
}
