//! The driver's kernel modules are built for every installed kernel.
//!
//! ## Why
//! DKMS builds modules for the kernels whose headers it finds, and goes on when a build fails. An
//! image that boots another kernel than the one it was baked on then comes up without a driver, on
//! every instance.
//!
//! ## How it is judged
//! At level image only, from files, so that the build instance needs no GPU. Every kernel below
//! `/lib/modules` must have `nvidia` and `nvidia_uvm`, built for that kernel (`vermagic`), all of
//! one version and flavour, and these must match the profile (`driver.minimum`, `driver.branch`,
//! `driver.kernel_module`). No kernel at all is an `error`. An image in which this was not judged
//! never passes.
//!
//! ## What to do
//! Install the headers of the kernel (`kernel-devel-…`, `linux-headers-…`) and build:
//! `dkms autoinstall -k RELEASE`, whose log is `/var/lib/dkms/nvidia/VERSION/build/make.log`.
//! Remove kernels that are not wanted, and hold the one that is.
//!
//! ## Source
//! dkms(8); modinfo(8); NVIDIA Driver Installation Guide,
//! <https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/>

use crate::check::{Check, Judge};
use crate::facts::{Facts, ImageFacts, InstalledKernel, ModuleFile, Reading};
use crate::findings::{Judgement, Outcome, Verdict};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::DriverVersion;
use crate::tally::Tally;

pub(crate) const CHECK: Check = Check {
    id: "image_kernel_modules",
    stage: Stage::Host,
    level: Level::Image,
    judge: Judge::Host(judge),
    documentation_url: "https://docs.nvidia.com/datacenter/tesla/driver-installation-guide/",
};

fn judge(facts: &Facts, profile: &Profile) -> Judgement {
    let image = queries::image(facts)?;
    let kernels = image.kernels.required("installed kernels")?;
    let mut tally = Tally::default();
    for kernel in kernels {
        judge_kernel(kernel, &mut tally);
    }
    let Some(module) = first_module(image) else {
        let outcome = tally.outcome(Outcome::error("no kernel is installed below /lib/modules"));
        return Ok(with_remedy(outcome));
    };
    for other in
        modules(image).filter(|it| (&it.version, it.flavor) != (&module.version, module.flavor))
    {
        tally.fail(format!(
            "{} is {} ({}), and {} is {} ({})",
            other.path, other.version, other.flavor, module.path, module.version, module.flavor
        ));
    }
    judge_profile(module, profile, &mut tally)?;
    let outcome = tally.outcome(Outcome::error("no module was judged"));
    if outcome.verdict != Verdict::Pass {
        return Ok(with_remedy(outcome));
    }
    let releases: Vec<&str> = kernels.iter().map(|it| it.release.as_str()).collect();
    Ok(Outcome::pass(format!(
        "nvidia and nvidia_uvm {} ({}) are built for kernel {}",
        module.version,
        module.flavor,
        releases.join(", ")
    )))
}

fn judge_kernel(kernel: &InstalledKernel, tally: &mut Tally) {
    let release = &kernel.release;
    for name in ["nvidia", "nvidia_uvm"] {
        match kernel.modules.get(name) {
            Some(Reading::Value(module)) if module.built_for == *release => {
                tally.pass(format!("module {name} is built for kernel {release}"));
            }
            Some(Reading::Value(module)) => tally.fail(format!(
                "module {name} of kernel {release} was built for {}",
                module.built_for
            )),
            Some(Reading::NotSupported) => {
                tally.fail(format!("kernel {release} has no module {name}"));
            }
            Some(Reading::NotRead(reason)) => {
                tally.error(format!("module {name} of kernel {release}: {reason}"));
            }
            None => tally.error(format!(
                "module {name} of kernel {release} was not searched for"
            )),
        }
    }
}

fn modules(image: &ImageFacts) -> impl Iterator<Item = &ModuleFile> {
    image
        .kernels
        .value()
        .into_iter()
        .flatten()
        .flat_map(|kernel| kernel.modules.values().filter_map(Reading::value))
}

/// The module that stands for the image's driver.
pub(super) fn first_module(image: &ImageFacts) -> Option<&ModuleFile> {
    modules(image).next()
}

fn judge_profile(module: &ModuleFile, profile: &Profile, tally: &mut Tally) -> Result<(), Outcome> {
    let driver: DriverVersion = module.version.parse().map_err(Outcome::error)?;
    let asked = &profile.driver;
    if let Some(minimum) = asked.minimum.as_ref().filter(|it| driver < **it) {
        tally.fail(format!(
            "the modules are of driver {driver}, the profile requires at least {minimum}"
        ));
    }
    if let Some(branch) = asked.branch.filter(|it| driver.branch() != *it) {
        tally.fail(format!(
            "the modules are of driver {driver}, the profile requires branch {branch}"
        ));
    }
    if let Some(flavor) = asked.kernel_module.filter(|it| module.flavor != *it) {
        tally.fail(format!(
            "the modules are {}, the profile requires {flavor} ones",
            module.flavor
        ));
    }
    Ok(())
}

fn with_remedy(outcome: Outcome) -> Outcome {
    if outcome.verdict != Verdict::Fail {
        return outcome;
    }
    outcome.remedy(
        "install the kernel's headers and build: dkms autoinstall -k RELEASE; remove kernels that are not wanted",
    )
}

#[cfg(test)]
mod tests {
    use crate::facts::{Facts, InstalledKernel, KernelModuleFlavor, ModuleFile, Reading};
    use crate::findings::{Finding, Verdict};
    use crate::test_machine::{healthy_image, image_of, judge_image_check};

    fn judge(facts: &Facts, profile: &str) -> Finding {
        judge_image_check(&super::CHECK, facts, profile)
    }

    fn kernels(facts: &mut Facts) -> &mut Vec<InstalledKernel> {
        match &mut image_of(facts).kernels {
            Reading::Value(kernels) => kernels,
            _ => unreachable!("the healthy image has kernels"),
        }
    }

    fn module<'a>(facts: &'a mut Facts, name: &str) -> &'a mut Reading<ModuleFile> {
        kernels(facts)[0].modules.get_mut(name).expect("it has it")
    }

    #[test]
    fn passes_with_the_version_the_flavour_and_the_kernel() {
        let finding = judge(
            &healthy_image(),
            "driver: {minimum: 580.65.06, branch: 580, kernel_module: open}",
        );
        assert_eq!(finding.verdict, Verdict::Pass);
        assert_eq!(
            finding.summary,
            "nvidia and nvidia_uvm 580.159.04 (open) are built for kernel 6.14.0-1015-aws"
        );
    }

    #[test]
    fn fails_for_a_kernel_without_modules() {
        let mut facts = healthy_image();
        let mut second = kernels(&mut facts)[0].clone();
        second.release = "6.14.0-1020-aws".to_owned();
        second
            .modules
            .values_mut()
            .for_each(|it| *it = Reading::NotSupported);
        kernels(&mut facts).push(second);
        let finding = judge(&facts, "{}");
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "kernel 6.14.0-1020-aws has no module nvidia; kernel 6.14.0-1020-aws has no module nvidia_uvm"
        );
    }

    #[test]
    fn fails_where_one_module_is_missing_or_of_another_build() {
        let mut facts = healthy_image();
        *module(&mut facts, "nvidia_uvm") = Reading::NotSupported;
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        for change in [
            |it: &mut ModuleFile| it.version = "570.86.15".to_owned(),
            |it: &mut ModuleFile| it.flavor = KernelModuleFlavor::Proprietary,
            |it: &mut ModuleFile| it.built_for = "6.14.0-1014-aws".to_owned(),
        ] {
            let mut facts = healthy_image();
            match module(&mut facts, "nvidia_uvm") {
                Reading::Value(module) => change(module),
                _ => unreachable!(),
            }
            assert_eq!(judge(&facts, "{}").verdict, Verdict::Fail);
        }
    }

    #[test]
    fn fails_for_a_driver_that_the_profile_does_not_want() {
        for profile in [
            "driver: {minimum: 590.44.01}",
            "driver: {branch: 570}",
            "driver: {kernel_module: proprietary}",
        ] {
            assert_eq!(
                judge(&healthy_image(), profile).verdict,
                Verdict::Fail,
                "{profile}"
            );
        }
    }

    #[test]
    fn errs_when_nothing_was_read() {
        let mut facts = healthy_image();
        *module(&mut facts, "nvidia") = Reading::NotRead("modinfo is not installed".to_owned());
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        kernels(&mut facts).clear();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        image_of(&mut facts).kernels = Reading::default();
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
        facts.host.image = None;
        assert_eq!(judge(&facts, "{}").verdict, Verdict::Error);
    }
}
