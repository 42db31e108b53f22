//! A user's own command under several layouts of GPUs: which GPUs it gets, and what its end, its
//! output and its use of the GPUs mean. Pure.

use crate::allocation::MEMORY_TOLERANCE_BYTES;
use crate::environment::messages::{KnownMessage, explain_message};
use crate::facts::{Facts, Layout, LayoutEnd, LayoutRun, Reading};
use crate::findings::Verdict;

/// How often NVML must be read while a command runs, before it counts as one that used no GPU.
/// NVML lists a process only while its context exists, and is read every 200 ms.
// Source: this project's choice: 0.6 s, in which a CUDA process initialises (0.3 s, BENCHMARKS.md)
// and works.
pub const ROUNDS_MINIMUM: u64 = 3;

/// The GPUs of a layout, or why it does not apply.
pub fn gpus_of(layout: Layout, usable: &[String]) -> Result<Vec<String>, String> {
    match (layout, usable) {
        (Layout::None, _) => Ok(Vec::new()),
        (_, []) => Err("no GPU can be given to the command".to_owned()),
        (Layout::Single, [.., last]) => Ok(vec![last.clone()]),
        (Layout::All, all) => Ok(all.to_vec()),
        (Layout::Subset, [_]) => Err("one GPU has no subset".to_owned()),
        (Layout::Subset, all) => Ok(all.iter().step_by(2).cloned().collect()),
    }
}

/// GPUs that the command used: those on which NVML listed its processes. Where NVML listed none of
/// them anywhere, as from another PID namespace, those whose memory in use grew while no other
/// process came.
pub fn used_gpus(run: &LayoutRun) -> Vec<&str> {
    let listed: Vec<&str> = run
        .gpus
        .iter()
        .filter(|(_, it)| !it.own.is_empty())
        .map(|(uuid, _)| uuid.as_str())
        .collect();
    if !listed.is_empty() {
        return listed;
    }
    let has_grown = run
        .gpus
        .iter()
        .filter(|(_, it)| it.others.is_empty() && it.peak_bytes > MEMORY_TOLERANCE_BYTES);
    has_grown.map(|(uuid, _)| uuid.as_str()).collect()
}

/// What one layout showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutResult {
    pub layout: Layout,
    pub verdict: Verdict,
    /// A lowercase fragment.
    pub summary: String,
    pub remedy: Option<String>,
}

impl LayoutResult {
    fn new(run: &LayoutRun, verdict: Verdict, summary: impl Into<String>) -> Self {
        Self {
            layout: run.layout,
            verdict,
            summary: summary.into(),
            remedy: None,
        }
    }

    fn with_remedy(mut self, remedy: impl Into<String>) -> Self {
        self.remedy = Some(remedy.into());
        self
    }
}

/// The verdict on a layout: the gravest of what it showed.
pub fn judge_layout(run: &LayoutRun, facts: &Facts) -> LayoutResult {
    if let Some(reason) = &run.skipped {
        return LayoutResult::new(run, Verdict::Skip, reason);
    }
    let end = match &run.end {
        Reading::Value(end) => end,
        Reading::NotRead(reason) => return LayoutResult::new(run, Verdict::Error, reason),
        Reading::NotSupported => {
            return LayoutResult::new(run, Verdict::Error, "the command was not started");
        }
    };
    strays(run, facts)
        .or_else(|| bad_end(run, end))
        .or_else(|| left_memory(run, facts))
        .or_else(|| unused(run))
        .or_else(|| suspicious(run))
        .unwrap_or_else(|| passed(run, facts))
}

/// Work on a GPU that the command was not given.
fn strays(run: &LayoutRun, facts: &Facts) -> Option<LayoutResult> {
    let strays: Vec<String> = used_gpus(run)
        .into_iter()
        .filter(|it| !run.given.iter().any(|given| given == it))
        .map(|it| gpu_in_words(facts, it))
        .collect();
    let strays = (!strays.is_empty()).then(|| strays.join(", "))?;
    if !is_listed(run) {
        // Of a process in another PID namespace, which may be foreign.
        let text = format!(
            "memory was taken on {strays}, which it was not given, and NVML lists no process there"
        );
        return Some(LayoutResult::new(run, Verdict::Error, text).with_remedy(
            "run again where the processes of all containers are shown (hostPID), and while no other user starts any",
        ));
    }
    let text = format!("it used {strays}, which it was not given");
    Some(LayoutResult::new(run, Verdict::Fail, text).with_remedy(
        "find where the command or its launcher sets or ignores CUDA_VISIBLE_DEVICES; in a container compare nvidia-smi -L inside and outside",
    ))
}

/// Whether NVML listed a process of the command.
fn is_listed(run: &LayoutRun) -> bool {
    run.gpus.values().any(|it| !it.own.is_empty())
}

/// Anything but exit code 0, with the likeliest reason.
fn bad_end(run: &LayoutRun, end: &LayoutEnd) -> Option<LayoutResult> {
    let text = match end {
        LayoutEnd::Exited { status: 0 } => return None,
        LayoutEnd::Exited { status } => format!("it exited with status {status}"),
        LayoutEnd::Killed { signal } => {
            format!("it was ended by signal {signal} ({})", signal_name(*signal))
        }
        LayoutEnd::TimedOut { seconds } => {
            format!("it did not end within {seconds:.0} s, and was ended")
        }
        LayoutEnd::NotStarted { reason } => format!("it could not be started: {reason}"),
    };
    if let LayoutEnd::NotStarted { .. } = end {
        return Some(
            LayoutResult::new(run, Verdict::Fail, text)
                .with_remedy("check the path of the program and its rights"),
        );
    }
    if run.oom_kills.value().is_some_and(|it| *it > 0) {
        let text = format!(
            "{text}; the kernel ended processes of its control group for want of host memory"
        );
        return Some(
            LayoutResult::new(run, Verdict::Fail, text)
                .with_remedy("raise the memory limit of the job, or start fewer processes"),
        );
    }
    let result = |text| LayoutResult::new(run, Verdict::Fail, text);
    if let Some((line, message)) = known_messages(run).into_iter().next() {
        let text = format!("{text}: {line} ({})", message.cause);
        return Some(result(text).with_remedy(&message.remedy));
    }
    let text = format!("{text}: {}", last_line(run));
    Some(result(text).with_remedy(remedy_of_end(end)))
}

fn remedy_of_end(end: &LayoutEnd) -> &'static str {
    match end {
        LayoutEnd::TimedOut { .. } => {
            "run the command with a stack dump (py-spy dump, faulthandler) to find where it waits, or raise --time-limit"
        }
        LayoutEnd::Killed { .. } => {
            "search the kernel log for the process and for Xids: dmesg | grep -e NVRM -e 'Killed process' -e segfault"
        }
        _ => "run the command alone with the same CUDA_VISIBLE_DEVICES",
    }
}

fn left_memory(run: &LayoutRun, facts: &Facts) -> Option<LayoutResult> {
    let left = run.gpus.iter().find(|(_, it)| {
        it.others.is_empty() && it.left_bytes.is_some_and(|it| it > MEMORY_TOLERANCE_BYTES)
    });
    let (uuid, gpu) = left?;
    let mib = gpu.left_bytes.unwrap_or_default() >> 20;
    let text = format!(
        "2 s after its end {mib} MiB more than before are in use on {}",
        gpu_in_words(facts, uuid)
    );
    Some(LayoutResult::new(run, Verdict::Fail, text).with_remedy(
        "list who holds the GPU: fuser -v /dev/nvidia*; where there is no process, reset the GPU",
    ))
}

/// GPUs were given and none was used, or that was not seen.
fn unused(run: &LayoutRun) -> Option<LayoutResult> {
    if !used_gpus(run).is_empty() {
        return None;
    }
    if let Some(trouble) = &run.view_trouble {
        let text = format!("it exited with status 0, but NVML was not read: {trouble}");
        return Some(LayoutResult::new(run, Verdict::Error, text));
    }
    let others: usize = run.gpus.values().map(|it| it.others.len()).sum();
    if others > 0 {
        let text = format!(
            "none of its processes used a GPU, and {others} that it did not start came meanwhile"
        );
        return Some(LayoutResult::new(run, Verdict::Error, text).with_remedy(
            "run again when no other process uses the GPUs; processes that a daemon starts for the command (docker run, srun) cannot be attributed to it: start this test inside of the container or the job",
        ));
    }
    let has_fallen_back = fell_back(run).is_some();
    if run.given.is_empty() && (run.rounds > 0 || has_fallen_back) {
        return None;
    }
    if run.rounds < ROUNDS_MINIMUM && !has_fallen_back {
        let text = format!(
            "it exited with status 0 after {:.1} s, before NVML could show whether it used a GPU",
            run.seconds
        );
        return Some(
            LayoutResult::new(run, Verdict::Error, text)
                .with_remedy("give a command that works the GPUs for a second or more"),
        );
    }
    let count = crate::words::counted(run.given.len(), "GPU");
    let text = format!("it was given {count} and used none: it computed on the CPU");
    let known = fell_back(run);
    Some(match known {
        Some((line, message)) => LayoutResult::new(run, Verdict::Fail, format!("{text} ({line})"))
            .with_remedy(&message.remedy),
        None => LayoutResult::new(run, Verdict::Fail, text)
            .with_remedy("check that the build has CUDA: gpu-validator environment"),
    })
}

/// Exit code 0, and yet something to improve.
fn suspicious(run: &LayoutRun) -> Option<LayoutResult> {
    let mut messages = known_messages(run);
    if run.given.is_empty() {
        messages.retain(|(_, it)| !means_no_gpu(it));
    }
    if let Some((line, message)) = messages.first() {
        let text = format!(
            "it exited with status 0 and printed: {line} ({})",
            message.cause
        );
        return Some(LayoutResult::new(run, Verdict::Warn, text).with_remedy(&message.remedy));
    }
    if run.survivors > 0 {
        let text = match run.survivors {
            1 => "it left 1 process when it ended".to_owned(),
            count => format!("it left {count} processes when it ended"),
        };
        return Some(
            LayoutResult::new(run, Verdict::Warn, text)
                .with_remedy("have the launcher end and wait for the processes that it starts"),
        );
    }
    if let Some(first) = run.shared_memory_left.first() {
        let text = format!(
            "it left {} in /dev/shm, first {first}",
            crate::words::counted(run.shared_memory_left.len(), "segment")
        );
        return Some(LayoutResult::new(run, Verdict::Warn, text).with_remedy(
            "unlink shared memory where its last user ends, also when that is killed",
        ));
    }
    let (used, given) = (used_gpus(run).len(), run.given.len());
    (used < given).then(|| {
        LayoutResult::new(
            run,
            Verdict::Warn,
            format!("it used {used} of its {given} GPUs"),
        )
        .with_remedy("have the launcher start a process for each GPU, where it should use all")
    })
}

fn passed(run: &LayoutRun, facts: &Facts) -> LayoutResult {
    let after = format!("exited with status 0 after {:.1} s", run.seconds);
    let text = match &used_gpus(run)[..] {
        [] => format!("it used no GPU, and {after}"),
        [only] => format!("it used {} alone, and {after}", gpu_in_words(facts, only)),
        several => format!("it used its {} GPUs, and {after}", several.len()),
    };
    let is_by_memory = !is_listed(run) && !run.given.is_empty();
    let text = if is_by_memory {
        format!("{text}; by the GPUs' memory, as NVML lists no process of it")
    } else {
        text
    };
    LayoutResult::new(run, Verdict::Pass, text)
}

/// Lines of the output with a known cause, in their order.
pub fn known_messages(run: &LayoutRun) -> Vec<(&str, &'static KnownMessage)> {
    let lines = run.messages.iter();
    lines
        .filter_map(|line| Some((line.as_str(), explain_message(line)?)))
        .collect()
}

fn fell_back(run: &LayoutRun) -> Option<(&str, &'static KnownMessage)> {
    known_messages(run)
        .into_iter()
        .find(|it| means_no_gpu(it.1))
}

/// Messages that a command without a GPU is expected to print.
fn means_no_gpu(message: &KnownMessage) -> bool {
    matches!(
        message.id.as_str(),
        "cpu_fallback" | "no_visible_gpu" | "no_driver" | "initialization_failed" | "cpu_build"
    )
}

/// The last line that is not empty, of standard error first.
fn last_line(run: &LayoutRun) -> &str {
    let lines = [&run.stderr, &run.stdout];
    let mut lines = lines
        .iter()
        .filter_map(|text| text.lines().rev().find(|it| !it.trim().is_empty()));
    lines.next().map_or("it printed nothing", str::trim)
}

/// `GPU 0 (0000:53:00.0)`; the UUID where the facts do not have the GPU.
pub fn gpu_in_words(facts: &Facts, uuid: &str) -> String {
    let is_it = |gpu: &&crate::facts::GpuFacts| gpu.uuid.value().is_some_and(|it| it == uuid);
    let index = facts.gpus.iter().position(|it| is_it(&it));
    let address = facts.gpu(uuid).and_then(|it| it.pci_address.value());
    match (index, address) {
        (Some(index), Some(address)) => format!("GPU {index} ({address})"),
        _ => uuid.to_owned(),
    }
}

/// Of the signals that end programs.
fn signal_name(signal: i32) -> &'static str {
    match signal {
        1 => "SIGHUP",
        2 => "SIGINT",
        4 => "SIGILL",
        6 => "SIGABRT",
        7 => "SIGBUS",
        8 => "SIGFPE",
        9 => "SIGKILL",
        11 => "SIGSEGV",
        15 => "SIGTERM",
        _ => "signal(7)",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn uuids(count: usize) -> Vec<String> {
        (0..count).map(|it| format!("GPU-{it}")).collect()
    }

    #[test]
    fn layouts_differ_from_each_other_and_from_the_first_gpu() {
        let two = uuids(2);
        assert_eq!(gpus_of(Layout::Single, &two), Ok(vec!["GPU-1".to_owned()]));
        assert_eq!(gpus_of(Layout::Subset, &two), Ok(vec!["GPU-0".to_owned()]));
        assert_eq!(gpus_of(Layout::All, &two), Ok(two));
        let subset = gpus_of(Layout::Subset, &uuids(5));
        assert_eq!(
            subset.map(|it| it.join(" ")),
            Ok("GPU-0 GPU-2 GPU-4".to_owned())
        );
    }

    #[test]
    fn a_layout_that_does_not_apply_has_a_reason_and_none_always_applies() {
        let one = gpus_of(Layout::Subset, &uuids(1));
        assert_eq!(one, Err("one GPU has no subset".to_owned()));
        for layout in [Layout::Single, Layout::All, Layout::Subset] {
            assert!(gpus_of(layout, &[]).is_err());
        }
        assert_eq!(gpus_of(Layout::None, &[]), Ok(vec![]));
        assert_eq!(gpus_of(Layout::None, &uuids(2)), Ok(vec![]));
    }

    #[test]
    fn the_last_line_of_standard_error_goes_before_that_of_standard_output() {
        let mut run = LayoutRun::of(Layout::All, uuids(1));
        assert_eq!(last_line(&run), "it printed nothing");
        run.stdout = "one\ntwo\n\n".to_owned();
        assert_eq!(last_line(&run), "two");
        run.stderr = "Traceback\n  KeyError: 'x'\n".to_owned();
        assert_eq!(last_line(&run), "KeyError: 'x'");
    }
}
