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

/// Generations between a process and its ancestor; a longer line is taken for none.
const GENERATIONS_MAXIMUM: usize = 128;

/// Whether `ancestor` started this process, or one that did.
pub(crate) fn descends_from(pid: u32, ancestor: u32) -> bool {
    let mut at = pid;
    for _ in 0..GENERATIONS_MAXIMUM {
        match parent(at) {
            Some(parent) if parent == ancestor => return true,
            Some(parent) if parent > 1 => at = parent,
            _ => return false,
        }
    }
    false
}

/// Clock ticks from boot to the start of a process; a zombie has not lost them.
pub(crate) fn start_ticks(pid: u32) -> Option<u64> {
    field(pid, 22)
}

/// The user of a process by name, else by number; `None` where there is no such process.
pub(crate) fn user(pid: u32) -> Option<String> {
    use std::os::unix::fs::MetadataExt as _;
    let uid = std::fs::metadata(format!("/proc/{pid}")).ok()?.uid();
    let accounts = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    Some(name_of_user(uid, &accounts).unwrap_or_else(|| format!("ID {uid}")))
}

/// Source: passwd(5): name, password, user ID, and more, with colons between them.
fn name_of_user(uid: u32, accounts: &str) -> Option<String> {
    accounts.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next().filter(|it| !it.is_empty())?;
        let number: u32 = fields.nth(1)?.parse().ok()?;
        (number == uid).then(|| name.to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::{descends_from, field_of, name_of_user, parent, user};

    #[test]
    fn a_user_is_named_where_the_account_is_known() {
        let accounts = "root:x:0:0:root:/root:/bin/sh\n\nbroken\njane:x:1000:1000::/home/jane:\n";
        assert_eq!(name_of_user(1000, accounts).as_deref(), Some("jane"));
        assert_eq!(name_of_user(0, accounts).as_deref(), Some("root"));
        assert_eq!(name_of_user(7, accounts), None);
        assert!(user(std::process::id()).is_some());
        assert_eq!(user(u32::MAX), None);
    }

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
        assert!(descends_from(std::process::id(), own.unwrap_or_default()));
        assert!(!descends_from(own.unwrap_or_default(), std::process::id()));
    }
}
