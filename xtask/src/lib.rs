//! `cargo xtask <task>`: build, codegen, CI and the pinned tools. Other tasks have crates of their
//! own next to the files that they work on; this crate starts them, and they share its library.

pub mod command_line;
pub mod debian_userland;
pub mod dist;
pub mod json_schema;
pub mod loopback;
pub mod tools;
pub mod workspace;

mod accessibility;
#[cfg(test)]
mod audit;
mod ci;
mod cloudwatch;
mod codegen;
#[cfg(test)]
mod crates_io;
mod delegated;
mod fuzz;
mod glibc_floor;
mod import_circles;
mod kernels;
mod monitoring;
mod packages;
#[cfg(test)]
mod renovate;
mod sbom;
mod system_packages;
mod test_groups;
#[cfg(test)]
mod workflow_rules;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use delegated::Words;

pub use command_line::EXIT_CODE_BAD_INPUT;

/// Builds, drives and checks gpu-validator.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", max_term_width = 100)]
struct CommandLine {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Judge a machine with the release binary: build it, run it there, bring the reports back
    ValidateAmi(Words),
    Dist(dist::Arguments),
    /// Run a program on a simulated GPU node, or list the nodes and faults
    Simulate(Words),
    /// Check, bake and publish the machine images of packer/
    Ami(Words),
    /// Build and check the container image of CI runners
    RunnerImage(Words),
    /// Prove the machine images: templates, systemd units, and whole bakes on a simulated machine
    Images(Words),
    /// Run the release binary on every simulated node and fault, and compare with what each must
    /// trip
    FaultMatrix(Words),
    /// Examine the expected HTML reports with axe-core in Chromium, in both themes
    Accessibility,
    Codegen(codegen::Arguments),
    Ci(ci::Arguments),
    /// Read JUnit reports with other parsers, and compare their counts with the JSON
    JunitReaders(Words),
    /// Compare nvidia-ml-py, gpustat and nvitop on simulated nodes with the nodes' scenarios
    NvmlClients(Words),
    /// Measure speed, memory, environments and false alarms on this machine's GPUs
    Hardware(Words),
    Fuzz(fuzz::Arguments),
    /// Fail where modules of a crate import each other in a circle
    ImportCircles,
    /// Check, compare, apply and delete the Kubernetes manifests, and validate nodes with them
    K8s(Words),
    /// Install and check the runners of GitHub Actions on Kubernetes
    Runners(Words),
    /// Build the validator's container image, or prove its Dockerfile without a registry
    ValidatorImage(Words),
    /// Merge the reports of many nodes
    Fleet(Words),
    /// Build the GPU kernels to PTX and cubins
    Kernels {
        #[arg(long)]
        check: bool,
    },
    Test(test_groups::Arguments),
    /// Check, plan and apply the Terraform modules
    Tf(Words),
    /// Check the alert rules and the dashboard against Prometheus, Grafana's schema and the metrics
    /// that are written
    Monitoring,
    Packages(system_packages::Arguments),
    Tools(tools::Arguments),
}

/// The crate of a task, and the task's name there.
fn crate_of(task: &Task) -> Option<(&'static str, &'static str, &Words)> {
    Some(match task {
        Task::ValidateAmi(words) => ("packer-tasks", "validate-ami", words),
        Task::Ami(words) => ("packer-tasks", "ami", words),
        Task::RunnerImage(words) => ("packer-tasks", "runner-image", words),
        Task::Images(words) => ("image-tests", "images", words),
        Task::Simulate(words) => ("harness", "simulate", words),
        Task::FaultMatrix(words) => ("harness", "fault-matrix", words),
        Task::JunitReaders(words) => ("harness", "junit-readers", words),
        Task::NvmlClients(words) => ("harness", "nvml-clients", words),
        Task::Hardware(words) => ("harness", "hardware", words),
        // Named here and not by the crate of the manifests: the test depends on that crate.
        Task::K8s(words) if words.start_with("e2e") => ("cluster-tests", "k8s", words),
        Task::K8s(words) => ("kubernetes-tasks", "k8s", words),
        Task::Runners(words) => ("kubernetes-tasks", "runners", words),
        Task::ValidatorImage(words) => ("kubernetes-tasks", "validator-image", words),
        Task::Fleet(words) => ("gpu-validator", "fleet", words),
        Task::Tf(words) => ("terraform-tasks", "tf", words),
        Task::Accessibility
        | Task::Dist(_)
        | Task::Codegen(_)
        | Task::Ci(_)
        | Task::Fuzz(_)
        | Task::ImportCircles
        | Task::Kernels { .. }
        | Task::Monitoring
        | Task::Packages(_)
        | Task::Test(_)
        | Task::Tools(_) => return None,
    })
}

/// The program `cargo xtask`.
pub fn main() -> ExitCode {
    let task = match command_line::parse::<CommandLine>() {
        Ok(command_line) => command_line.task,
        Err(code) => return code,
    };
    if let Some((package, name, words)) = crate_of(&task) {
        return command_line::code_or_bad_input(delegated::run(package, name, words));
    }
    command_line::code(match task {
        Task::Dist(arguments) => dist::run(&arguments),
        Task::Accessibility => accessibility::run(),
        Task::Codegen(arguments) => codegen::run(&arguments),
        Task::Ci(arguments) => return ci::run(&arguments),
        Task::Fuzz(arguments) => fuzz::run(&arguments),
        Task::ImportCircles => import_circles::run(),
        Task::Kernels { check } => workspace::shell().and_then(|sh| kernels::run(&sh, check)),
        Task::Test(arguments) => test_groups::run(&arguments),
        Task::Monitoring => monitoring::run(),
        Task::Packages(arguments) => system_packages::run(&arguments),
        Task::Tools(arguments) => tools::run(&arguments),
        delegated => unreachable!("{delegated:?} has a crate of its own"),
    })
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory as _, Parser as _};

    use super::{CommandLine, crate_of};
    use crate::{command_line, packages, workspace};

    #[test]
    fn the_command_line_is_consistent() {
        CommandLine::command().debug_assert();
    }

    /// Every `cargo xtask` of the guides is a task of this crate, or of one whose own test parses
    /// the rest of the line.
    #[test]
    fn the_guides_tasks_exist() {
        for command in command_line::of_guides(&[]) {
            let words = ["xtask"].into_iter().chain(command.split_whitespace());
            if let Err(error) = CommandLine::try_parse_from(words) {
                panic!("cargo xtask {command}: {error}");
            }
        }
    }

    #[test]
    fn delegated_tasks_name_programs_of_the_workspace() {
        let packages = packages::of_workspace(&workspace::shell().expect("a shell"));
        let packages = packages.expect("packages");
        let is_program = |name: &str| {
            let mut targets = packages.iter().flat_map(|it| &it.targets);
            targets.any(|it| it.is("bin") && it.name == name)
        };
        for name in CommandLine::command()
            .get_subcommands()
            .map(|it| it.get_name().to_owned())
        {
            let Ok(parsed) = CommandLine::try_parse_from(["xtask", &name]) else {
                panic!("{name} without arguments is refused before it is delegated");
            };
            if let Some((package, task, _)) = crate_of(&parsed.task) {
                assert_eq!(task, name);
                assert!(is_program(package), "{package}");
            }
        }
    }

    #[test]
    fn every_word_of_a_delegated_task_is_passed_on() {
        let line = [
            "xtask", "simulate", "h200x1", "--set", "a=b", "--", "sh", "--help", "--", "x",
        ];
        let parsed = CommandLine::try_parse_from(line).expect("a task");
        let (package, task, words) = crate_of(&parsed.task).expect("a crate");
        assert_eq!((package, task), ("harness", "simulate"));
        assert_eq!(words.words(), &line[2..]);
        let help = CommandLine::try_parse_from(["xtask", "k8s", "e2e", "--help"]).expect("a task");
        let (package, _, words) = crate_of(&help.task).expect("a crate");
        assert_eq!(package, "cluster-tests");
        assert_eq!(words.words(), ["e2e", "--help"]);
    }
}
