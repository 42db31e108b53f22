//! The answer to a question such as `torch 2.11 cu126 on B200 driver 570`, with no machine at hand.

use crate::environment::builds::{cuda_of_tag, framework_release, framework_releases};
use crate::environment::compatibility::{
    Build, Code, Compatibility, Machine, MachineGpu, Start, judge,
};
use crate::environment::{CodeTarget, FrameworkBuild, FrameworkRelease};
use crate::nearest_name::nearest_name;
use crate::reference::{self, CudaVersion, DriverVersion, GpuModel};

/// A question after it was read.
#[derive(Clone, Debug)]
pub struct Question {
    pub subject: Subject,
    pub python: Option<String>,
    pub machine: Machine,
}

/// What shall start.
#[derive(Clone, Debug)]
pub enum Subject {
    /// A toolkit, or a program that it built.
    Toolkit(CudaVersion),
    /// A framework, with the CUDA version of the build where one is named.
    Framework {
        name: String,
        version: String,
        cuda: Option<CudaVersion>,
    },
}

/// The answer: what was judged, and how it starts.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Answer {
    /// `torch 2.11 for CUDA 12.6`.
    pub subject: String,
    /// `B200, driver 570`.
    pub machine: String,
    pub compatibility: Compatibility,
}

pub const EXPECTED: &str = "a framework or toolkit, and what it shall run on: \"torch 2.11 cu126 on B200 driver 570\", \
                            \"cuda 13.0 on V100 driver 580.65.06\", \"torch 2.8 python 3.12 on T4 driver 535 compat 12.8\"";

/// Frameworks by the names that people use.
const FRAMEWORKS: [(&str, &str); 9] = [
    ("torch", "torch"),
    ("pytorch", "torch"),
    ("tensorflow", "tensorflow"),
    ("tf", "tensorflow"),
    ("onnxruntime", "onnxruntime"),
    ("onnxruntime-gpu", "onnxruntime"),
    ("jax", "jax"),
    ("cupy", "cupy"),
    ("vllm", "vllm"),
];

/// Words of a question, consumed from the left.
struct Words<'q> {
    words: Vec<&'q str>,
    at: usize,
}

impl<'q> Words<'q> {
    fn of(text: &'q str) -> Self {
        let is_space = |it: char| it.is_whitespace() || it == ',' || it == ';';
        Self {
            words: text.split(is_space).filter(|it| !it.is_empty()).collect(),
            at: 0,
        }
    }

    fn next(&mut self) -> Option<&'q str> {
        let word = self.words.get(self.at).copied();
        self.at += 1;
        word
    }

    fn value_of(&mut self, what: &str) -> Result<&'q str, String> {
        self.next().ok_or_else(|| {
            format!("`{what}` is the last word; expected its value after it, as in {EXPECTED}")
        })
    }

    /// The model whose name the most of the next words spell.
    fn model(&mut self, word: &str) -> Option<Vec<&'static GpuModel>> {
        const WORDS_MAXIMUM: usize = 7;
        let rest = self.words.get(self.at..).unwrap_or_default();
        for more in (0..=WORDS_MAXIMUM.min(rest.len())).rev() {
            let mut name = word.to_owned();
            for next in rest.iter().take(more) {
                name.push(' ');
                name.push_str(next);
            }
            let models = models_named(&name);
            if !models.is_empty() {
                self.at += more;
                return Some(models);
            }
        }
        None
    }
}

/// Reads a question; the error names the word and what was expected.
pub fn parse(text: &str) -> Result<Question, String> {
    let mut words = Words::of(text);
    let mut subject: Option<(String, Option<String>)> = None;
    let mut cuda: Option<CudaVersion> = None;
    let mut is_toolkit = false;
    let mut python = None;
    let mut machine = Machine::default();
    while let Some(word) = words.next() {
        let lower = word.to_lowercase();
        let framework = FRAMEWORKS
            .iter()
            .find(|(name, _)| lower.split(['=', '@']).next() == Some(name));
        if let Some((_, name)) = framework {
            let attached = lower
                .split_once(['=', '@'])
                .map(|(_, it)| it.trim_start_matches('='));
            let version = match attached {
                Some(version) => version.to_owned(),
                None => words.value_of(word)?.to_owned(),
            };
            subject = Some(((*name).to_owned(), Some(version)));
            continue;
        }
        match lower.as_str() {
            "on" | "with" | "and" | "for" | "a" | "the" | "gpu" | "nvidia" => {}
            "cuda" | "toolkit" | "nvcc" => {
                let version = words.value_of(word)?;
                cuda = Some(cuda_version(version)?);
                is_toolkit = subject.is_none();
            }
            "driver" => read_driver(words.value_of(word)?, &mut machine)?,
            "compat" | "cuda-compat" => {
                machine.compat = Some(cuda_version(words.value_of(word)?)?);
            }
            "python" => python = Some(words.value_of(word)?.to_owned()),
            _ => {
                if let Some(tag) = lower.strip_prefix("cuda-compat-") {
                    machine.compat = Some(cuda_version(&tag.replace('-', "."))?);
                } else if let Some(version) = cuda_of_tag(&lower) {
                    cuda = Some(version);
                } else if lower == "cpu" {
                    return Err(
                        "a CPU build uses no GPU; expected a CUDA tag such as cu126".to_owned()
                    );
                } else {
                    add_gpus(word, &mut words, &mut machine)?;
                }
            }
        }
    }
    let subject = match (subject, cuda) {
        (Some((name, Some(version))), cuda) => {
            let (version, cuda) = split_local(&version, cuda)?;
            Subject::Framework {
                name,
                version,
                cuda,
            }
        }
        (_, Some(version)) if is_toolkit => Subject::Toolkit(version),
        (_, Some(version)) => Subject::Toolkit(version),
        _ => {
            return Err(format!(
                "the question names no framework or toolkit; expected {EXPECTED}"
            ));
        }
    };
    if machine.gpus.is_empty() && machine.driver.is_none() {
        return Err(format!(
            "the question names no GPU and no driver; expected {EXPECTED}"
        ));
    }
    Ok(Question {
        subject,
        python,
        machine,
    })
}

/// Reads a machine without a subject: `B200 driver 570.124.06`.
pub fn parse_machine(text: &str) -> Result<Machine, String> {
    // Any subject makes it a question; only its machine is taken.
    let question = parse(&format!("cuda 12.8 on {text}"))?;
    Ok(question.machine)
}

/// `2.11.0+cu126` names its CUDA version itself.
fn split_local(
    version: &str,
    cuda: Option<CudaVersion>,
) -> Result<(String, Option<CudaVersion>), String> {
    let numeric = |text: &str| text.split('.').all(|it| it.parse::<u32>().is_ok());
    let (release, local) = match version.split_once('+') {
        Some((release, local)) => (release, Some(local)),
        None => (version, None),
    };
    if !numeric(release) || !release.contains('.') {
        return Err(format!(
            "`{version}` is not a version, expected one like 2.11 or 2.11.0+cu126"
        ));
    }
    Ok((release.to_owned(), cuda.or(local.and_then(cuda_of_tag))))
}

fn cuda_version(text: &str) -> Result<CudaVersion, String> {
    cuda_of_tag(text).map_or_else(|| text.parse(), Ok)
}

fn read_driver(text: &str, machine: &mut Machine) -> Result<(), String> {
    /// A release number that no release of a branch reaches: "branch 570" means its newest release.
    const NEWEST: u32 = 999;
    let text = text.trim_start_matches(['r', 'R']);
    if let Ok(branch) = text.parse::<u32>() {
        machine.driver_is_branch = true;
        machine.driver = format!("{branch}.{NEWEST}").parse().ok();
        return Ok(());
    }
    machine.driver_is_branch = false;
    machine.driver = Some(text.parse::<DriverVersion>()?);
    Ok(())
}

fn add_gpus<'q>(word: &'q str, words: &mut Words<'q>, machine: &mut Machine) -> Result<(), String> {
    // A capability stands for a GPU that the table of models does not have.
    if let Ok(target) = word.parse::<CodeTarget>()
        && (word.starts_with("sm_") || word.contains('.'))
    {
        machine.gpus.push(MachineGpu {
            name: format!("a GPU of compute capability {}", target.capability),
            capability: target.capability,
            data_center: true,
        });
        return Ok(());
    }
    let Some(models) = words.model(word) else {
        let names = reference::gpu_models().iter().map(|it| it.name.as_str());
        let near = nearest_name(word, names)
            .map(|it| format!(", did you mean {it}?"))
            .unwrap_or_default();
        return Err(format!(
            "`{word}` is not a GPU model, framework or option{near}; expected {EXPECTED}"
        ));
    };
    for model in models {
        let gpu = MachineGpu {
            name: model.name.clone(),
            capability: model.compute_capability,
            data_center: model.data_center,
        };
        let known =
            |it: &MachineGpu| it.capability == gpu.capability && it.data_center == gpu.data_center;
        // Variants of a model (SXM and PCIe) are one for this question.
        if !machine.gpus.iter().any(known) {
            machine.gpus.push(MachineGpu {
                name: short_name(&gpu.name),
                ..gpu
            });
        }
    }
    Ok(())
}

/// `V100` of `V100 SXM2 16GB`; `GeForce RTX 4090` stays.
fn short_name(name: &str) -> String {
    name.split(" SXM").next().unwrap_or(name).to_owned()
}

/// Models whose name starts with these words, with or without the words before the number.
fn models_named(name: &str) -> Vec<&'static GpuModel> {
    let wanted = normalized(name);
    let models = reference::gpu_models().iter();
    let matches = |candidate: &str| {
        let candidate = normalized(candidate);
        candidate == wanted || candidate.starts_with(&format!("{wanted} "))
    };
    models
        .filter(|model| {
            let bare = |name: &str| -> String {
                name.trim_start_matches("NVIDIA ")
                    .trim_start_matches("GeForce ")
                    .trim_start_matches("Tesla ")
                    .to_owned()
            };
            matches(&model.name)
                || matches(&bare(&model.name))
                || model
                    .product_names
                    .iter()
                    .any(|it| matches(it) || matches(&bare(it)))
        })
        .collect()
}

fn normalized(name: &str) -> String {
    name.to_lowercase().replace(['-', '_'], " ")
}

/// Answers a question.
pub fn answer(question: &Question) -> Answer {
    let machine = describe(&question.machine);
    let (subject, mut compatibility) = match &question.subject {
        Subject::Toolkit(cuda) => {
            let build = Build {
                name: format!("CUDA {cuda}"),
                cuda: *cuda,
                code: Code::OfToolkit,
            };
            (build.name.clone(), judge(&build, &question.machine))
        }
        Subject::Framework {
            name,
            version,
            cuda,
        } => answer_framework(name, version, *cuda, &question.machine),
    };
    if let (Some(python), Subject::Framework { name, version, .. }) =
        (&question.python, &question.subject)
    {
        add_python(name, version, python, &mut compatibility);
    }
    if question.machine.gpus.is_empty() {
        compatibility.add(
            Start::Unknown,
            "no GPU is named, so that architectures are not judged",
            None,
        );
    }
    Answer {
        subject,
        machine,
        compatibility,
    }
}

fn describe(machine: &Machine) -> String {
    let mut parts: Vec<String> = machine.gpus.iter().map(|it| it.name.clone()).collect();
    parts.extend(machine.driver.as_ref().map(|driver| {
        if machine.driver_is_branch {
            format!("driver branch {} (its newest release)", driver.branch())
        } else {
            format!("driver {driver}")
        }
    }));
    parts.extend(machine.compat.map(|it| format!("cuda-compat {it}")));
    parts.join(", ")
}

fn answer_framework(
    name: &str,
    version: &str,
    cuda: Option<CudaVersion>,
    machine: &Machine,
) -> (String, Compatibility) {
    let subject = |cuda: CudaVersion| format!("{name} {version} for CUDA {cuda}");
    let release = framework_release(name, version);
    let Some(cuda) = cuda.or_else(|| default_build(release?).map(|it| it.cuda)) else {
        let known: Vec<&str> = framework_releases(name)
            .iter()
            .map(|it| &it.release[..])
            .collect();
        let known = match known.as_slice() {
            [] => String::new(),
            [first, .., last] => format!(" (releases {first} to {last} are on record)"),
            [only] => format!(" (release {only} is on record)"),
        };
        return (
            format!("{name} {version}"),
            Compatibility::unknown(format!(
                "no build of {name} {version} is on record{known}; name its CUDA version, as in cu126"
            )),
        );
    };
    let build = release.and_then(|it| build_for(it, cuda));
    let recorded = build.map(targets).unwrap_or_default();
    let is_recorded = !recorded.is_empty();
    let judged = Build {
        name: subject(cuda),
        cuda,
        code: if is_recorded {
            Code::Listed(recorded)
        } else {
            Code::OfToolkit
        },
    };
    let mut compatibility = judge(&judged, machine);
    match (release, build) {
        (Some(release), None) => {
            let published: Vec<String> = release.builds.iter().map(|it| it.cuda.to_string()).collect();
            compatibility.add(
                Start::Unknown,
                format!(
                    "no build of {name} {} for CUDA {cuda} is on record: published are {}",
                    release.release,
                    published.join(", ")
                ),
                None,
            );
        }
        (Some(_), Some(_)) if is_recorded => {}
        _ => compatibility.add(
            if compatibility.start == Start::Impossible { Start::Impossible } else { Start::Limited },
            format!("the architecture list of {name} {version} for CUDA {cuda} is not on record: judged by the toolkit"),
            None,
        ),
    }
    (judged.name, compatibility)
}

fn default_build(release: &FrameworkRelease) -> Option<&FrameworkBuild> {
    release.builds.iter().find(|it| it.default)
}

fn build_for(release: &FrameworkRelease, cuda: CudaVersion) -> Option<&FrameworkBuild> {
    let same = |it: &&FrameworkBuild| (it.cuda.major, it.cuda.minor) == (cuda.major, cuda.minor);
    release.builds.iter().find(same)
}

fn targets(build: &FrameworkBuild) -> Vec<CodeTarget> {
    let machine_code = build.machine_code.iter().filter_map(|it| it.parse().ok());
    let ptx = build
        .ptx
        .iter()
        .filter_map(|it| format!("compute_{}", it.replace('.', "")).parse().ok());
    machine_code.chain(ptx).collect()
}

/// Whether the release has wheels for this interpreter.
pub(crate) fn add_python(
    name: &str,
    version: &str,
    python: &str,
    compatibility: &mut Compatibility,
) {
    let Some((oldest, newest)) = framework_release(name, version).and_then(|it| it.python.as_ref())
    else {
        return;
    };
    let number = |text: &str| -> Option<(u32, u32)> {
        let mut parts = text.split('.');
        Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
    };
    let (Some(found), Some(oldest_number), Some(newest_number)) =
        (number(python), number(oldest), number(newest))
    else {
        return;
    };
    if found < oldest_number || found > newest_number {
        compatibility.add(
            Start::Impossible,
            format!(
                "{name} {version} has wheels for Python {oldest} to {newest}, this is {python}"
            ),
            Some(format!(
                "use Python {oldest} to {newest}, or another release of {name}"
            )),
        );
    }
}

impl Answer {
    /// The answer for a terminal.
    pub fn text(&self) -> String {
        use std::fmt::Write as _;
        let Compatibility {
            start,
            reasons,
            minimum_driver,
            remedy,
        } = &self.compatibility;
        let mut text = format!("{} on {}: {}\n", self.subject, self.machine, start.name());
        for reason in reasons {
            let _ = writeln!(text, "  {reason}");
        }
        if let Some(minimum) = minimum_driver {
            let _ = writeln!(text, "  minimum driver: {minimum}");
        }
        if let Some(remedy) = remedy {
            let _ = writeln!(text, "  remedy: {remedy}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{answer, parse};
    use crate::environment::compatibility::Start;

    fn ask(question: &str) -> (Start, String) {
        let question = parse(question).unwrap_or_else(|error| panic!("{question}: {error}"));
        let answer = answer(&question);
        (answer.compatibility.start, answer.text())
    }

    /// The consequences that the reference tables must have.
    #[test]
    fn consequences() {
        for (question, start, words) in [
            // Volta and CUDA 13.
            (
                "cuda 13.0 on V100 driver 580.65.06",
                Start::Impossible,
                "no longer supports V100",
            ),
            (
                "torch 2.11 on V100 driver 580",
                Start::Impossible,
                "no kernel image for V100",
            ),
            (
                "torch 2.11 cu126 on V100 driver 580",
                Start::Full,
                "machine code sm_70 for V100",
            ),
            // Volta's last driver branch is 580.
            (
                "cuda 12.6 on V100 driver 590",
                Start::Impossible,
                "580 is its last branch",
            ),
            (
                "cuda 12.6 on V100 driver 580",
                Start::Full,
                "compiles for V100",
            ),
            // Blackwell needs CUDA 12.8 and driver 570.
            (
                "torch 2.11 cu126 on B200 driver 570",
                Start::Impossible,
                "no kernel image for B200",
            ),
            (
                "torch 2.11 cu126 on B200 driver 570",
                Start::Impossible,
                "CUDA 12.8 or newer",
            ),
            (
                "cuda 12.6 on B200 driver 570",
                Start::Limited,
                "no machine code for B200",
            ),
            (
                "cuda 12.8 on B200 driver 565",
                Start::Impossible,
                "needs branch 570",
            ),
            (
                "torch 2.8 on B200 driver 570.124.06",
                Start::Full,
                "machine code sm_100 for B200",
            ),
            (
                "torch 2.8 on B300 driver 580",
                Start::Full,
                "sm_100 runs on B300",
            ),
            // T4 is fine everywhere.
            (
                "cuda 11.0 on T4 driver 450.51.06",
                Start::Full,
                "compiles for T4",
            ),
            (
                "torch 2.15 on T4 driver 595.45.04",
                Start::Full,
                "machine code sm_75",
            ),
            (
                "cuda 13.2 on T4 driver 580.65.06",
                Start::Limited,
                "sm_75 for T4",
            ),
            // Below the minimum of the major version.
            (
                "torch 2.11 on H200 driver 570.86.15",
                Start::Impossible,
                "needs driver 580.65.06",
            ),
            (
                "torch 2.11 on H200 driver 570.86.15",
                Start::Impossible,
                "cuda-compat-13-0",
            ),
            (
                "torch 2.11 on H200 driver 570.86.15 compat 13.0",
                Start::Full,
                "lets CUDA 13.0 run",
            ),
            // A consumer card and a compat package.
            (
                "torch 2.11 on RTX 4090 driver 570 compat 13.0",
                Start::Impossible,
                "error 804",
            ),
            (
                "torch 2.11 on RTX 4090 driver 570",
                Start::Impossible,
                "install driver 580.65.06 or newer\n",
            ),
            // A package that shadows a newer driver.
            (
                "torch 2.8 on H200 driver 580 cuda-compat-12-8",
                Start::Impossible,
                "shadows",
            ),
            (
                "torch 2.8 on H200 driver 550 compat 12.8",
                Start::Impossible,
                "error 803",
            ),
            // Ada runs Ampere's code.
            (
                "torch 2.8 on L4 driver 570",
                Start::Full,
                "sm_86 runs on L4",
            ),
            // PTX alone.
            (
                "tensorflow 2.21 on B200 driver 570",
                Start::Limited,
                "compiles compute_90",
            ),
            (
                "onnxruntime 1.31 on B200 driver 580",
                Start::Impossible,
                "no kernel image",
            ),
            // Python.
            (
                "torch 2.15 python 3.9 on T4 driver 595",
                Start::Impossible,
                "Python 3.11 to 3.15",
            ),
            // The seed's node: eight RTX A6000 of capability 8.6.
            (
                "torch 2.7.1+cu118 on sm_86 driver 575.57.08",
                Start::Limited,
                "not on record",
            ),
            (
                "torch 2.15 cu126 on V100 driver 580",
                Start::Unknown,
                "published are 13.2, 13.0",
            ),
            (
                "jax 0.12 on T4 driver 580",
                Start::Unknown,
                "name its CUDA version",
            ),
        ] {
            let (found, text) = ask(question);
            assert_eq!(found, start, "{question}: {text}");
            assert!(text.contains(words), "{question}: {text}");
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_the_word() {
        for (question, words) in [
            ("", "names no framework or toolkit"),
            ("torch 2.11 cu126", "names no GPU and no driver"),
            ("torch", "the last word"),
            ("torch 2.11 on B2OO driver 570", "B2OO"),
            ("torch eleven on B200", "is not a version"),
            ("cuda 12 on B200", "not a CUDA version"),
            ("torch 2.11 on T4 driver x", "not a driver version"),
            ("torch 2.11 cpu on T4", "CPU build"),
        ] {
            let error = parse(question).expect_err(question);
            assert!(error.contains(words), "{question}: {error}");
        }
    }
}
