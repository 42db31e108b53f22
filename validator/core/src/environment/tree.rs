//! Toolkits, libraries and Python environments as a tree for a terminal.

use std::fmt::Write as _;

use crate::environment::compatibility::{Build, Code, Compatibility, Machine, judge};
use crate::environment::installed::{failure, judge_package, name_of};
use crate::facts::{
    CudaToolkit, EnvironmentFacts, PythonEnvironment, PythonPackage, PythonProof, Reading,
    ResolvedLibrary,
};

/// The whole tree.
pub fn tree(environment: &EnvironmentFacts, machine: &Machine) -> String {
    let mut tree = Tree::default();
    tree.machine(machine);
    tree.toolkits(environment, machine);
    tree.libraries(environment);
    tree.modules(environment);
    tree.pythons(environment, machine);
    if let Some(folder) = &environment.walk.stopped_at {
        tree.line(
            0,
            &format!(
                "the walk of the disk stopped at {folder} after {} folders: environments may be missing; name them with --python",
                environment.walk.folders
            ),
        );
    }
    tree.text
}

#[derive(Default)]
struct Tree {
    text: String,
}

impl Tree {
    fn line(&mut self, depth: usize, text: &str) {
        // A path or a message may hold control characters.
        let text: String = text
            .chars()
            .map(|it| if it.is_control() { ' ' } else { it })
            .collect();
        let _ = writeln!(self.text, "{}{text}", "  ".repeat(depth));
    }

    fn machine(&mut self, machine: &Machine) {
        let driver = machine.driver.as_ref();
        let driver = driver.map_or_else(|| "no driver".to_owned(), |it| format!("driver {it}"));
        let gpus: Vec<String> = machine
            .gpus
            .iter()
            .map(|it| format!("{} (compute capability {})", it.name, it.capability))
            .collect();
        let gpus = if gpus.is_empty() {
            "no GPU".to_owned()
        } else {
            gpus.join(", ")
        };
        self.line(0, &format!("judged against: {driver}, {gpus}"));
    }

    fn toolkits(&mut self, environment: &EnvironmentFacts, machine: &Machine) {
        self.line(0, "CUDA toolkits");
        if environment.toolkits.is_empty() {
            self.line(1, "none; burns and checks of this program need none");
        }
        for toolkit in &environment.toolkits {
            self.toolkit(toolkit, environment, machine);
        }
        if let Reading::Value(Some(nvcc)) = &environment.nvcc_on_path {
            self.line(1, &format!("nvcc on the path: {nvcc}"));
        }
    }

    fn toolkit(
        &mut self,
        toolkit: &CudaToolkit,
        environment: &EnvironmentFacts,
        machine: &Machine,
    ) {
        let version = toolkit.version.value();
        let shown = version.map_or("version not known", String::as_str);
        self.line(
            1,
            &format!("{shown}  {}  {}", toolkit.path, toolkit.kind.name()),
        );
        if !toolkit.links.is_empty() {
            self.line(2, &format!("links: {}", toolkit.links.join(", ")));
        }
        if let Some(nvcc) = &toolkit.nvcc
            && environment.nvcc_on_path == Reading::Value(None)
        {
            let folder = nvcc.trim_end_matches("/nvcc");
            self.line(
                2,
                &format!("nvcc is not on the path: export PATH={folder}:$PATH"),
            );
        }
        match version.map(|it| it.parse()) {
            Some(Ok(cuda)) => {
                let build = Build {
                    name: format!("CUDA {cuda}"),
                    cuda,
                    code: Code::OfToolkit,
                };
                self.compatibility(2, &judge(&build, machine));
            }
            Some(Err(error)) => self.line(2, &error),
            None => {
                if let Reading::NotRead(reason) = &toolkit.version {
                    self.line(2, reason);
                }
            }
        }
    }

    fn compatibility(&mut self, depth: usize, compatibility: &Compatibility) {
        let mut reasons = compatibility.reasons.iter();
        let first = reasons.next().map_or("", String::as_str);
        self.line(depth, &format!("{}: {first}", compatibility.start.name()));
        for reason in reasons {
            self.line(depth + 1, reason);
        }
        if let Some(remedy) = &compatibility.remedy {
            self.line(depth + 1, &format!("remedy: {remedy}"));
        }
    }

    fn libraries(&mut self, environment: &EnvironmentFacts) {
        self.line(0, "libraries of programs without their own");
        if environment.libraries.is_empty() {
            self.line(1, "none");
        }
        for library in &environment.libraries {
            self.library(1, library);
        }
        for folder in &environment.stub_folders {
            self.line(1, &format!("stubs are searched: {folder}"));
        }
    }

    fn library(&mut self, depth: usize, library: &ResolvedLibrary) {
        let version = library.version.as_deref().unwrap_or("-");
        let path = library.path.as_deref().unwrap_or("(not found)");
        let by = library.found_by.name();
        self.line(depth, &format!("{}  {version}  {path}  {by}", library.name));
        for shadowed in &library.shadowed {
            self.line(depth + 1, &format!("hides {shadowed}"));
        }
    }

    fn modules(&mut self, environment: &EnvironmentFacts) {
        if environment.available_modules.is_empty() {
            return;
        }
        self.line(0, "modules (available, not loaded)");
        for module in &environment.available_modules {
            self.line(1, &format!("{}  {}", module.name, module.path));
        }
    }

    fn pythons(&mut self, environment: &EnvironmentFacts, machine: &Machine) {
        self.line(0, "Python environments");
        if environment.pythons.is_empty() {
            self.line(1, "none");
        }
        for python in &environment.pythons {
            self.python(python, machine);
        }
    }

    fn python(&mut self, python: &PythonEnvironment, machine: &Machine) {
        let active = if python.active { "  active" } else { "" };
        let named = if python.named { "  named" } else { "" };
        self.line(1, &format!("{}{active}{named}", name_of(python)));
        if let Reading::NotRead(reason) = &python.interpreter {
            self.line(2, &format!("interpreter: {reason}"));
        }
        for package in &python.packages {
            self.package(package, python, machine);
        }
        for defect in &python.defects {
            self.line(2, &format!("defect: {}", defect.text));
        }
        for code in &python.startup_code {
            self.line(2, &format!("runs at every start: {code}"));
        }
        if !python.libraries.is_empty() {
            self.line(2, "libraries");
            for library in &python.libraries {
                self.library(3, library);
            }
        }
        for proof in &python.proofs {
            self.proof(proof);
        }
        if let Some(reason) = &python.not_started {
            self.line(2, &format!("not started: {reason}"));
        }
    }

    fn package(&mut self, package: &PythonPackage, python: &PythonEnvironment, machine: &Machine) {
        let cuda = match &package.cuda {
            Reading::Value(version) => format!("  CUDA {version}"),
            Reading::NotSupported => "  no CUDA".to_owned(),
            Reading::NotRead(_) => String::new(),
        };
        self.line(2, &format!("{} {}{cuda}", package.name, package.version));
        if let Reading::Value(code) = &package.device_code {
            let codes: Vec<&str> = code
                .machine_code
                .keys()
                .chain(code.ptx.keys())
                .map(String::as_str)
                .collect();
            let codes = codes.join(" ");
            self.line(3, &format!("{}: {codes}", code.library));
        }
        if let Some(compatibility) = judge_package(package, python, machine) {
            self.compatibility(3, &compatibility);
        }
    }

    fn proof(&mut self, proof: &PythonProof) {
        let name = proof.framework.name();
        let seconds = proof.duration_s;
        let Some(failure) = failure(proof, |_| true) else {
            self.line(2, &format!("started {name}: works, {seconds:.1} s"));
            for step in &proof.steps {
                let mut text = format!("{}  {:.3} s", step.name, step.seconds);
                if let Some(reason) = &step.skipped {
                    let _ = write!(text, "  skipped: {reason}");
                }
                for (key, value) in &step.results {
                    let _ = write!(text, "  {key}={value}");
                }
                self.line(3, &text);
            }
            return;
        };
        self.line(2, &format!("started {name}: {failure}, {seconds:.1} s"));
        if let Some(known) = failure.known {
            self.line(3, &format!("remedy: {}", known.remedy));
        }
        for line in failure.output.lines().filter(|it| !it.trim().is_empty()) {
            self.line(3, &format!("| {line}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::tree;
    use crate::environment::compatibility::machine_of;
    use crate::facts::{CudaToolkit, EnvironmentFacts, ProofEnd, Reading};
    use crate::test_machine::{healthy_node, torch_environment};

    #[test]
    fn every_part_is_printed() {
        let facts = healthy_node();
        let mut failing = torch_environment();
        failing.proofs[0].end = ProofEnd::Signal(11);
        failing.proofs[0].unfinished_step = Some("gemm_fp32".to_owned());
        failing.proofs[0].output = "Fatal Python error: \u{1b}[31mSegmentation fault".to_owned();
        let environment = EnvironmentFacts {
            toolkits: vec![CudaToolkit {
                path: "/usr/local/cuda-13.1".to_owned(),
                version: Reading::Value("13.1.0".to_owned()),
                nvcc: Some("/usr/local/cuda-13.1/bin/nvcc".to_owned()),
                ..CudaToolkit::default()
            }],
            nvcc_on_path: Reading::Value(None),
            pythons: vec![torch_environment(), failing],
            ..EnvironmentFacts::default()
        };
        let text = tree(&environment, &machine_of(&facts));
        for part in [
            "export PATH=/usr/local/cuda-13.1/bin:$PATH",
            "limited: minor-version compatibility",
            "sm_90 for H200",
            "torch 2.8.0+cu128  CUDA 12.8",
            "full: ",
            "started torch: works",
            "killed by signal 11 (SIGSEGV) during gemm_fp32",
            "| Fatal Python error:  [31mSegmentation fault",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn a_machine_without_anything_is_calm() {
        let text = tree(&EnvironmentFacts::default(), &machine_of(&healthy_node()));
        assert!(text.contains("need none"), "{text}");
    }
}
