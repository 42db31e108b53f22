//! From names to a resolved scenario: node, then overrides, then faults, each value checked by its
//! type.

use crate::catalogue::{Catalogue, NodeFile, short_name, with_nearest};
use crate::dotted_path::{WHOLE, set_path};
use crate::faults::{GpuSelection, Step, Xid};
use crate::gpu::{Gpu, MemoryFaultKind, WrongResults};
use crate::quantity::{Trigger, parse_after, parse_duration};
use crate::scenario::{LibraryBehaviour, ResolvedScenario, Scenario, ScheduledEvent, TimedChange};
use crate::state::{GpuState, MAX_CHANGES, State};
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use std::path::Path;

/// Resolves a node with faults (names or files) and overrides (`gpu.memory=2GiB`, on every GPU;
/// `gpus.3.memory=2GiB`).
pub fn resolve(
    catalogue: &Catalogue,
    node: &str,
    faults: &[String],
    overrides: &[String],
) -> Result<ResolvedScenario> {
    let (path, file) = catalogue.node(node)?;
    let node_name = short_name(node);
    let mut base = healthy(catalogue, &path, &node_name, &file)?;
    for assignment in overrides {
        apply_override(&mut base, assignment)
            .with_context(|| format!("in the override `{assignment}`"))?;
    }
    let mut resolved = ResolvedScenario {
        name: node_name,
        healthy: base.clone(),
        base,
        timed: Vec::new(),
        events: Vec::new(),
    };
    for name in faults {
        add_fault(catalogue, &mut resolved, name)?;
        resolved.name = format!("{}+{}", resolved.name, short_name(name));
    }
    check_count(&resolved)?;
    Ok(resolved)
}

fn check_count(resolved: &ResolvedScenario) -> Result<()> {
    ensure!(
        resolved.timed.len() <= MAX_CHANGES,
        "the faults have more than {MAX_CHANGES} changes in time"
    );
    Ok(())
}

/// Faults set on a node while programs run on it.
#[derive(Debug)]
pub struct NodeChange<'change> {
    pub catalogue: &'change Catalogue,
    /// Everything back to what the node was without faults, before the rest.
    pub healthy: bool,
    /// Names or files of faults; their times count from now.
    pub faults: &'change [String],
    /// `PATH=VALUE`, such as `gpus.3.temperature.load_c=95`.
    pub overrides: &'change [String],
}

/// The scenario of a node that runs, with changes from now on.
pub(crate) fn resolve_change(
    resolved: &ResolvedScenario,
    change: &NodeChange<'_>,
    state: &State,
) -> Result<ResolvedScenario> {
    let mut changed = resolved.clone();
    let now = Trigger::AtNs(u64::try_from(state.elapsed().as_nanos())?);
    let at_once = |values| TimedChange {
        trigger: now,
        gpu: 0,
        values,
    };
    if change.healthy {
        let values = vec![(WHOLE.to_owned(), resolved.healthy.clone())];
        changed.timed.push(at_once(values));
        let node = resolved.name.split('+').next().unwrap_or_default();
        node.clone_into(&mut changed.name);
    }
    for assignment in change.overrides {
        let values = override_values(&changed, assignment)
            .with_context(|| format!("in the override `{assignment}`"))?;
        changed.timed.push(at_once(values));
    }
    for name in change.faults {
        let (path, fault) = change.catalogue.fault(name)?;
        let selection = fault.selection();
        for step in fault.steps() {
            add_later_step(&mut changed, &selection, &step, state).map_err(|(key, error)| {
                error.context(
                    key.map_or_else(|| path.display().to_string(), |key| place(&path, &key)),
                )
            })?;
        }
        changed.name = format!("{}+{}", changed.name, short_name(name));
    }
    check_count(&changed)?;
    Ok(changed)
}

/// A step's trigger, counted from the node's history.
fn from_now(trigger: Option<Trigger>, gpu: &GpuState, elapsed_ns: u64) -> Trigger {
    match trigger {
        None => Trigger::AtNs(elapsed_ns),
        Some(Trigger::AtNs(ns)) => Trigger::AtNs(elapsed_ns.saturating_add(ns)),
        Some(Trigger::AfterLaunches(count)) => {
            Trigger::AfterLaunches(gpu.launches().saturating_add(count))
        }
        Some(Trigger::AfterLoadNs(ns)) => Trigger::AfterLoadNs(gpu.loaded_ns().saturating_add(ns)),
        Some(Trigger::AtTemperatureC(degrees)) => Trigger::AtTemperatureC(degrees),
    }
}

fn add_later_step(
    resolved: &mut ResolvedScenario,
    selection: &GpuSelection,
    step: &Step,
    state: &State,
) -> Result<(), KeyedError> {
    let gpus = selected(resolved, selection)?;
    let own = trigger(step).map_err(|error| (Some("at".to_owned()), error))?;
    let first = gpus.first().copied().unwrap_or(0);
    let elapsed_ns = u64::try_from(state.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let values = later_values(resolved, step, &gpus)?;
    resolved.timed.push(TimedChange {
        trigger: from_now(own, state.gpu(first as usize), elapsed_ns),
        gpu: first,
        values,
    });
    add_events(resolved, step, &gpus, Some(resolved.timed.len() - 1));
    Ok(())
}

/// The values of an override on a node that runs, tried on what the earlier changes leave.
fn override_values(resolved: &ResolvedScenario, assignment: &str) -> Result<Vec<(String, Value)>> {
    let mut trial = changed_scenario(resolved);
    let (paths, value) = parse_override(&trial, assignment)?;
    for path in &paths {
        apply(&mut trial, path, &value)?;
    }
    Ok(paths
        .into_iter()
        .map(|path| (path, value.clone()))
        .collect())
}

/// The scenario after all of its changes.
fn changed_scenario(resolved: &ResolvedScenario) -> Value {
    let mut scenario = resolved.base.clone();
    for (path, value) in resolved.timed.iter().flat_map(|change| &change.values) {
        set_path(&mut scenario, path, value.clone());
    }
    scenario
}

/// The typed scenario at its start.
pub fn scenario_at_start(resolved: &ResolvedScenario) -> Result<Scenario> {
    typed(&resolved.base)
}

fn healthy(catalogue: &Catalogue, path: &Path, node_name: &str, file: &NodeFile) -> Result<Value> {
    let (model_path, model) = catalogue
        .model(&file.model)
        .with_context(|| format!("in the node file {}", path.display()))?;
    ensure!(
        !file.pci_addresses.is_empty(),
        "{}: pci_addresses is empty",
        path.display()
    );
    ensure!(
        file.pci_addresses.len() <= crate::state::MAX_GPUS,
        "{}: a node has at most {} GPUs",
        path.display(),
        crate::state::MAX_GPUS
    );
    let mut gpus = Vec::new();
    for (index, address) in (0u32..).zip(&file.pci_addresses) {
        let mut gpu = model.clone();
        let Some(fields) = gpu.as_object_mut() else {
            bail!("{}: a GPU model is a map of values", model_path.display());
        };
        let uuid = match &file.uuid_prefix {
            Some(prefix) => format!("{prefix}{index}"),
            None => uuid_of(&format!("{node_name}/{index}")),
        };
        // Consumer boards have no serial number.
        let consumer = fields
            .get("brand")
            .is_some_and(|brand| brand == "geforce" || brand == "geforce-rtx");
        if file.uuid_prefix.is_none() && !consumer {
            fields.insert("serial".to_owned(), serial_of(&uuid).into());
        }
        fields.insert("uuid".to_owned(), uuid.into());
        fields.insert("minor_number".to_owned(), index.into());
        fields.insert("pci_address".to_owned(), address.clone().into());
        gpus.push(gpu);
    }
    let mut scenario = serde_json::json!({ "gpus": gpus });
    let fields = scenario.as_object_mut().context("a scenario is a map")?;
    fields.insert("driver".to_owned(), serde_json::to_value(&file.driver)?);
    fields.insert("host".to_owned(), serde_json::to_value(&file.host)?);
    fields.insert(
        "processes".to_owned(),
        serde_json::to_value(&file.processes)?,
    );
    // Written out in full, so that every value has its place and a path that names none is an
    // error.
    let typed_model =
        typed(&scenario).with_context(|| format!("in the GPU model {}", model_path.display()))?;
    let mut scenario = serde_json::to_value(typed_model)?;
    let mut values = Vec::new();
    for index in 0..file.pci_addresses.len() {
        let own = u32::try_from(index)
            .ok()
            .and_then(|index| file.gpus.get(&index));
        for (key, value) in std::iter::once(&file.gpu).chain(own).flatten() {
            values.push((format!("gpus.{index}.{key}"), key.as_str(), value));
        }
    }
    apply_all(&mut scenario, &values).map_err(|(key, error)| error.context(place(path, key)))?;
    if let Some(index) = file
        .gpus
        .keys()
        .find(|index| **index as usize >= file.pci_addresses.len())
    {
        bail!(
            "{}: gpus.{index}: the node has {} GPUs",
            path.display(),
            file.pci_addresses.len()
        );
    }
    Ok(scenario)
}

fn add_fault(catalogue: &Catalogue, resolved: &mut ResolvedScenario, name: &str) -> Result<()> {
    let (path, fault) = catalogue.fault(name)?;
    let selection = fault.selection();
    for step in fault.steps() {
        add_step(resolved, &selection, &step).map_err(|(key, error)| {
            error.context(key.map_or_else(|| path.display().to_string(), |key| place(&path, &key)))
        })?;
    }
    Ok(())
}

/// An error with the key of the fault file that it is about.
type KeyedError = (Option<String>, anyhow::Error);

fn keyed(key: &str) -> impl FnOnce(anyhow::Error) -> KeyedError {
    let key = key.to_owned();
    move |error| (Some(key), error)
}

/// Adds one step.
fn add_step(
    resolved: &mut ResolvedScenario,
    selection: &GpuSelection,
    step: &Step,
) -> Result<(), KeyedError> {
    let gpus = selected(resolved, selection)?;
    let trigger = trigger(step).map_err(|error| (Some("at".to_owned()), error))?;
    let first = gpus.first().copied().unwrap_or(0);
    let change = match trigger {
        None => {
            let values = step_values(step, &gpus)?;
            apply_all(&mut resolved.base, &values)
                .map_err(|(key, error)| (Some(key.to_owned()), error))?;
            None
        }
        Some(trigger) => {
            let values = later_values(resolved, step, &gpus)?;
            resolved.timed.push(TimedChange {
                trigger,
                gpu: first,
                values,
            });
            Some(resolved.timed.len() - 1)
        }
    };
    add_events(resolved, step, &gpus, change);
    Ok(())
}

fn selected(resolved: &ResolvedScenario, selection: &GpuSelection) -> Result<Vec<u32>, KeyedError> {
    let count = resolved.base["gpus"].as_array().map_or(0, Vec::len);
    let gpus = selection.indices(count);
    match gpus.iter().find(|gpu| **gpu as usize >= count) {
        Some(gpu) => Err((
            Some("gpu".to_owned()),
            anyhow!("GPU {gpu} does not exist: {} has {count}", resolved.name),
        )),
        None => Ok(gpus),
    }
}

/// The values of a later change, tried on what the earlier ones leave, so that their types are
/// checked now and not at run time.
fn later_values(
    resolved: &ResolvedScenario,
    step: &Step,
    gpus: &[u32],
) -> Result<Vec<(String, Value)>, KeyedError> {
    let mut trial = changed_scenario(resolved);
    let values = step_values(step, gpus)?;
    apply_all(&mut trial, &values).map_err(|(key, error)| (Some(key.to_owned()), error))?;
    Ok(values
        .into_iter()
        .map(|(path, _, value)| (path, value.clone()))
        .collect())
}

/// Absolute paths, keys and values of a step's changes.
fn step_values<'step>(
    step: &'step Step,
    gpus: &[u32],
) -> Result<Vec<(String, &'step str, &'step Value)>, KeyedError> {
    let mut values = Vec::new();
    for (key, value) in &step.changes {
        for path in absolute_paths(key, gpus).map_err(keyed(key))? {
            values.push((path, key.as_str(), value));
        }
    }
    Ok(values)
}

fn add_events(resolved: &mut ResolvedScenario, step: &Step, gpus: &[u32], change: Option<usize>) {
    for gpu in gpus {
        let address = resolved.base["gpus"][*gpu as usize]["pci_address"]
            .as_str()
            .unwrap_or("")
            .to_owned();
        // The driver writes the address without its function.
        let pci = address
            .rsplit_once('.')
            .map_or(address.as_str(), |(device, _)| device);
        let port = resolved.base["gpus"][*gpu as usize]["pcie"]["port"].as_str();
        let port = port.unwrap_or(pci).to_owned();
        let event = |xid, kernel_log, times| ScheduledEvent {
            change,
            gpu: *gpu,
            xid,
            kernel_log,
            times,
        };
        if let Some(Xid { code, message }) = &step.xid {
            let line = format!("NVRM: Xid (PCI:{pci}): {code}, {message}");
            resolved.events.push(event(Some(*code), vec![line], 1));
        }
        if !step.kernel_log.is_empty() {
            let lines = step.kernel_log.iter();
            let lines = lines.map(|it| it.replace("{pci}", pci).replace("{port}", &port));
            let lines = lines.collect();
            resolved
                .events
                .push(event(None, lines, step.kernel_log_times));
        }
    }
}

fn trigger(step: &Step) -> Result<Option<Trigger>> {
    match (&step.at, &step.after) {
        (None, None) => Ok(None),
        (Some(at), None) => {
            let duration = parse_duration(at).map_err(|error| anyhow!("at: {error}"))?;
            Ok(Some(Trigger::AtNs(u64::try_from(duration.as_nanos())?)))
        }
        (None, Some(after)) => {
            let trigger = parse_after(after).map_err(|error| anyhow!("after: {error}"))?;
            Ok(Some(trigger))
        }
        (Some(_), Some(_)) => bail!("`at` and `after` contradict each other; give one"),
    }
}

fn apply_override(base: &mut Value, assignment: &str) -> Result<()> {
    let (paths, value) = parse_override(base, assignment)?;
    for path in paths {
        apply(base, &path, &value)?;
    }
    Ok(())
}

fn parse_override(base: &Value, assignment: &str) -> Result<(Vec<String>, Value)> {
    let (key, text) = assignment
        .split_once('=')
        .with_context(|| "an override is PATH=VALUE, such as gpu.memory=2GiB".to_owned())?;
    let value: Value =
        serde_yaml::from_str(text).with_context(|| format!("`{text}` is not a value"))?;
    let count = base["gpus"].as_array().map_or(0, Vec::len);
    let paths = absolute_paths(key, &GpuSelection::All.indices(count))?;
    Ok((paths, value))
}

/// `gpu.x` on each selected GPU becomes `gpus.N.x`; other layers are themselves.
fn absolute_paths(key: &str, gpus: &[u32]) -> Result<Vec<String>> {
    const LAYERS: [&str; 8] = [
        "gpu",
        "gpus",
        "driver",
        "nvml",
        "cuda",
        "cublaslt",
        "host",
        "processes",
    ];
    let (layer, rest) = key.split_once('.').unwrap_or((key, ""));
    if !LAYERS.contains(&layer) {
        let nearest = crate::catalogue::nearest(layer, LAYERS.into_iter())
            .map_or(String::new(), |name| {
                format!("; the nearest valid name is `{name}`")
            });
        bail!(
            "unknown layer `{layer}`, expected one of {}{nearest}",
            LAYERS.join(", ")
        );
    }
    if layer != "gpu" {
        return Ok(vec![key.to_owned()]);
    }
    let suffix = if rest.is_empty() {
        String::new()
    } else {
        format!(".{rest}")
    };
    Ok(gpus
        .iter()
        .map(|gpu| format!("gpus.{gpu}{suffix}"))
        .collect())
}

/// Sets values, each with its absolute path and the key that its file gives it; an error comes with
/// the key it is about.
fn apply_all<'key>(
    scenario: &mut Value,
    values: &[(String, &'key str, &Value)],
) -> Result<(), (&'key str, anyhow::Error)> {
    let mut together = scenario.clone();
    for (path, _, value) in values {
        set_path(&mut together, path, (*value).clone());
    }
    // Checked once when all is well, because a check reads the whole scenario; one by one only to
    // find the wrong one.
    if let Ok(checked) = typed(&together).and_then(|typed| Ok(serde_json::to_value(typed)?)) {
        *scenario = checked;
        return Ok(());
    }
    for (path, key, value) in values {
        apply(scenario, path, value).map_err(|error| (*key, error))?;
    }
    Ok(())
}

/// Sets a value and checks that the whole is still a scenario.
fn apply(scenario: &mut Value, path: &str, value: &Value) -> Result<()> {
    let mut trial = scenario.clone();
    set_path(&mut trial, path, value.clone());
    // Read and written back, so that sizes such as `2GiB` become numbers and defaults of a new
    // value are filled in.
    *scenario = serde_json::to_value(typed(&trial)?)?;
    Ok(())
}

fn typed(scenario: &Value) -> Result<Scenario> {
    let scenario: Scenario = serde_path_to_error::deserialize(scenario).map_err(|error| {
        let path = error.path().to_string();
        anyhow!("{path}: {}", with_nearest(&error.into_inner().to_string()))
    })?;
    check_names(&scenario)?;
    Ok(scenario)
}

/// Refuses names of functions, kernels and multiprocessors that there are not: a fault that strikes
/// nothing reads as a healthy GPU.
fn check_names(scenario: &Scenario) -> Result<()> {
    type IsFunction = fn(&str) -> bool;
    let libraries: [(&str, &LibraryBehaviour, IsFunction); 3] = [
        ("nvml", &scenario.nvml, crate::nvml::is_function),
        ("cuda", &scenario.cuda, |name| {
            crate::cuda::function(name).is_some()
        }),
        ("cublaslt", &scenario.cublaslt, |name| {
            name.starts_with("cublasLt")
        }),
    ];
    for (layer, library, is_function) in libraries {
        let lists = [&library.hang, &library.crash, &library.missing_symbols];
        let named = lists.into_iter().flatten().chain(library.returns.keys());
        for name in named {
            ensure!(is_function(name), "{layer}: there is no function `{name}`");
        }
    }
    for (index, gpu) in scenario.gpus.iter().enumerate() {
        let calls = &gpu.nvml;
        let lists = calls.hang.iter().chain(&calls.crash);
        for name in lists.chain(calls.returns.keys()).chain(calls.delay.keys()) {
            ensure!(
                crate::nvml::is_function(name),
                "gpus[{index}].nvml: there is no function `{name}`"
            );
        }
        if let Some(wrong) = &gpu.wrong_results {
            check_wrong_results(wrong, gpu)
                .with_context(|| format!("gpus[{index}].wrong_results"))?;
        }
        for fault in &gpu.memory_faults {
            let is_alias = fault.kind == MemoryFaultKind::Aliased;
            ensure!(
                is_alias == fault.onto.is_some() && fault.bit < 8 && fault.every > 0,
                "gpus[{index}].memory_faults: `onto` belongs to `aliased` and to nothing else, `bit` is one of a byte (0 to 7), \
                 and `every` is at least 1"
            );
        }
    }
    Ok(())
}

fn check_wrong_results(wrong: &WrongResults, gpu: &Gpu) -> Result<()> {
    if let Some(part) = &wrong.kernel {
        let names = crate::cuda::kernels::names();
        let meant = names.clone().any(|name| name.contains(part.as_str()));
        if !meant {
            let nearest = crate::catalogue::nearest(part, names).map_or(String::new(), |name| {
                format!("; the nearest valid name is `{name}`")
            });
            bail!("kernel: no kernel's name contains `{part}`{nearest}");
        }
    }
    ensure!(
        wrong.sm.is_none_or(|sm| sm < gpu.sm_count),
        "sm: the GPU has multiprocessors 0 to {}",
        gpu.sm_count.saturating_sub(1)
    );
    Ok(())
}

/// FNV-1a with a start of its own.
fn hash(start: u64, text: &str) -> u64 {
    text.bytes().fold(start, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// Thirteen digits that are the same for the same text, as NVIDIA's serial numbers have.
fn serial_of(text: &str) -> String {
    format!(
        "16{:011}",
        hash(0xcbf2_9ce4_8422_2325, text) % 100_000_000_000
    )
}

/// A UUID that is the same for the same text.
fn uuid_of(text: &str) -> String {
    let digits = format!(
        "{:016x}{:016x}",
        hash(0xcbf2_9ce4_8422_2325, text),
        hash(0x9e37_79b9_7f4a_7c15, text)
    );
    format!(
        "GPU-{}-{}-4{}-a{}-{}",
        &digits[..8],
        &digits[8..12],
        &digits[13..16],
        &digits[17..20],
        &digits[20..]
    )
}

/// The file and, where it can be found, the line of a key.
fn place(path: &Path, key: &str) -> String {
    let last = key.rsplit('.').next().unwrap_or(key);
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let line = text
        .lines()
        .position(|line| line.trim_start().starts_with(&format!("{key}:")))
        .or_else(|| {
            text.lines()
                .position(|line| line.trim_start().starts_with(&format!("{last}:")))
        });
    match line {
        Some(line) => format!("{}:{}: {key}", path.display(), line + 1),
        None => format!("{}: {key}", path.display()),
    }
}
