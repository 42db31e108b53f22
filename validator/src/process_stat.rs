//! `/proc/PID/stat`, by the numbers that `proc_pid_stat(5)` gives its fields.

use std::str::FromStr;

/// A field from the third on; `None` where there is no such process.
pub(crate) fn field<T: FromStr>(pid: u32, number: usize) -> Option<T> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    field_of(&stat, number)
}

/// The name in parentheses may hold anything, so that fields are counted from its end.
fn field_of<T: FromStr>(stat: &str, number: usize) -> Option<T> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(number - 3)?.parse().ok()
}

/// The process that started this one, or the one that took its place.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    field(pid, 4)
}

/// Clock ticks from boot to the start of a process; a zombie has not lost them.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    field(pid, 22)
}

#[cfg(test)]
mod tests {
    use super::{field_of, parent};

    #[test]
    fn fields_are_found_whatever_the_name_of_the_process() {
        let stat = "7 (a) R 9) ) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4711 20";
        assert_eq!(field_of(stat, 3), Some('S'));
        assert_eq!(field_of(stat, 4), Some(1));
        assert_eq!(field_of(stat, 22), Some(4711));
        assert_eq!(field_of::<u64>("nonsense", 22), None);
    }

    #[test]
    fn a_process_has_a_parent() {
        let own = parent(std::process::id());
        assert_eq!(own, Some(std::os::unix::process::parent_id()));
    }
}
