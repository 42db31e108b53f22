//! The GPU is of the expected model.
//!
//! ## Why
//! A node with another GPU than its pool promises runs jobs slower, or not at all. A GPU that names
//! itself wrongly has a wrong or damaged VBIOS.
//!
//! ## How it is judged
//! The product name that NVML gives must be the one that the profile names (`gpus.model`: the
//! product name, or the name of a model of the reference table), else the one that the EC2 instance
//! type has. With neither, `gpus_uniform` judges whether the GPUs of the machine are alike. A GPU
//! of a known model must have that model's compute capability. A model that is not in the reference
//! table is a `warn`: its ECC, NVLink, memory and power are judged without knowing what they should
//! be.
//!
//! Where CUDA was read, the GPU must have its model's multiprocessors, and no fewer than another
//! GPU of its name: `fail`. Not judged in MIG mode, of a virtual GPU, and where a share of MPS is
//! set, which show a part of the GPU.
//!
//! A virtual GPU (vGPU) is skipped unless the profile or the instance type names a model.
//!
//! ## What to do
//! Check that the machine is of the type that its pool requires, or correct the profile.
//!
//! ## Source
//! NVIDIA's product names and compute capabilities, <https://developer.nvidia.com/cuda-gpus>.

use std::collections::HashMap;

use crate::check::{Check, Judge, JudgeGpu};
use crate::expect;
use crate::facts::{CudaDevice, Facts, GpuFacts};
use crate::findings::{Judgement, Outcome};
use crate::level::{Level, Stage};
use crate::profile::Profile;
use crate::queries;
use crate::reference::GpuModel;

pub(crate) const CHECK: Check = Check {
    id: "gpu_model",
    stage: Stage::Gpu,
    level: Level::Quick,
    judge: Judge::EachGpuAmongAll(among_all),
    documentation_url: "https://developer.nvidia.com/cuda-gpus",
};

/// Limits the multiprocessors that CUDA shows to a process.
const MPS_SHARE: &str = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";

/// What CUDA offers.
struct Offered<'f> {
    facts: &'f Facts,
    devices: HashMap<&'f str, &'f CudaDevice>,
    /// The most multiprocessors of a device with this name.
    multiprocessors: HashMap<&'f str, u32>,
}

fn among_all<'f>(facts: &'f Facts, profile: &'f Profile) -> JudgeGpu<'f> {
    let mut offered = Offered {
        facts,
        devices: HashMap::new(),
        multiprocessors: HashMap::new(),
    };
    for device in facts.cuda.devices.value().into_iter().flatten() {
        offered.devices.entry(&device.uuid).or_insert(device);
        let most = offered.multiprocessors.entry(&device.name).or_default();
        *most = device.multiprocessors.max(*most);
    }
    Box::new(move |gpu| judge(gpu, &offered, profile))
}

fn judge(gpu: &GpuFacts, offered: &Offered<'_>, profile: &Profile) -> Judgement {
    let name = gpu.name.required("product name")?;
    let model = expect::gpu_model(gpu);
    let expected = expect::gpu_model_name(offered.facts, profile);
    if let Some(expected) = &expected
        && !expect::is_model(gpu, &expected.value)
    {
        return Ok(Outcome::fail(format!(
            "the GPU is a {name}, {} requires {}",
            expected.source, expected.value
        ))
        .expected(&expected.value)
        .observed(name)
        .remedy("check that the machine is of the type that its pool requires"));
    }
    if queries::is_vgpu(gpu) {
        return Ok(Outcome::skip(format!(
            "the GPU is {name}, a profile of a virtual GPU, and no expected model is configured"
        )));
    }
    let Some(model) = model else {
        return Ok(Outcome::warn(format!(
            "the GPU is a {name}, which the reference table does not know"
        ))
        .remedy("state in the profile what this GPU must have, or use a newer gpu-validator"));
    };
    let capability = *gpu.compute_capability.required("compute capability")?;
    if capability != model.compute_capability {
        return Ok(Outcome::fail(format!(
            "the GPU calls itself {name} but has compute capability {capability}, a {} has {}",
            model.name, model.compute_capability
        ))
        .expected(model.compute_capability)
        .observed(capability)
        .remedy("have the GPU's VBIOS inspected"));
    }
    if let Some((own, expected, source)) = lacks_multiprocessors(gpu, offered, model) {
        return Ok(Outcome::fail(format!(
            "the GPU has {own} multiprocessors, {source} {expected}"
        ))
        .expected(format!("{expected} multiprocessors"))
        .observed(own)
        .remedy("reset the GPU; if they stay away, have it replaced"));
    }
    Ok(Outcome::pass(format!("the GPU is a {name}")))
}

/// Its multiprocessors, the expected number, and the source of that, where CUDA shows fewer.
fn lacks_multiprocessors(
    gpu: &GpuFacts,
    offered: &Offered<'_>,
    model: &GpuModel,
) -> Option<(u32, u32, &'static str)> {
    let is_whole = gpu.mig.value().is_none_or(|it| !it.current) && !queries::is_vgpu(gpu);
    let environment = offered.facts.host.environment.value();
    let has_share = environment.is_some_and(|it| it.contains_key(MPS_SHARE));
    if !is_whole || has_share {
        return None;
    }
    let own = offered.devices.get(gpu.uuid.value()?.as_str())?;
    let of_model = model
        .multiprocessors
        .map(|it| (it, "a GPU of this model has"));
    let best = offered.multiprocessors.get(own.name.as_str());
    let of_sibling = best.map(|it| (*it, "another GPU of this model here has"));
    let (expected, source) = of_model
        .into_iter()
        .chain(of_sibling)
        .find(|(expected, _)| own.multiprocessors < *expected)?;
    Some((own.multiprocessors, expected, source))
}

#[cfg(test)]
mod tests {
    use super::CHECK;
    use crate::facts::{ComputeCapability, Reading};
    use crate::findings::Verdict;
    use crate::test_machine::{
        healthy_node, healthy_t4, judge_check, judge_gpu, judge_healthy, judge_only_gpu,
        make_model_unknown,
    };

    #[test]
    fn passes_on_the_model_of_the_machine() {
        assert!(
            judge_healthy(&CHECK)
                .iter()
                .all(|it| it.verdict == Verdict::Pass)
        );
    }

    #[test]
    fn passes_whether_the_profile_names_product_or_model() {
        for name in ["NVIDIA H200", "H200 SXM"] {
            let finding = judge_gpu(&CHECK, &format!("gpus: {{model: {name}}}"), |_| {});
            assert_eq!(finding.verdict, Verdict::Pass, "{name}");
        }
    }

    #[test]
    fn fails_on_another_model_than_the_profile_names() {
        let finding = judge_gpu(&CHECK, "gpus: {model: NVIDIA B200}", |_| {});
        assert_eq!(finding.verdict, Verdict::Fail);
        assert_eq!(
            finding.summary,
            "the GPU is a NVIDIA H200, the profile requires NVIDIA B200"
        );
    }

    #[test]
    fn a_name_that_only_begins_alike_is_another_model() {
        let finding = judge_gpu(&CHECK, "gpus: {model: NVIDIA H200}", |gpu| {
            gpu.name = Reading::Value("NVIDIA H200 NVL".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn fails_on_a_compute_capability_that_the_model_does_not_have() {
        let finding = judge_only_gpu(&CHECK, "{}", {
            let mut gpu = healthy_t4();
            gpu.compute_capability = Reading::Value(ComputeCapability { major: 8, minor: 0 });
            gpu
        });
        assert_eq!(finding.verdict, Verdict::Fail);
    }

    #[test]
    fn warns_of_a_model_that_nobody_knows() {
        let finding = judge_only_gpu(&CHECK, "{}", {
            let mut gpu = healthy_t4();
            make_model_unknown(&mut gpu);
            gpu
        });
        assert_eq!(finding.verdict, Verdict::Warn);
    }

    #[test]
    fn another_model_beside_it_is_judged_by_gpus_uniform() {
        let mut facts = healthy_node();
        facts.host.ec2 = Reading::NotSupported;
        facts.gpus.truncate(2);
        facts.gpus[1] = healthy_t4();
        let findings = judge_check(&CHECK, &facts, "{}");
        assert_eq!(findings[0].verdict, Verdict::Pass);
        assert_eq!(findings[1].verdict, Verdict::Pass);
    }

    #[test]
    fn errs_when_the_name_was_not_read() {
        let finding = judge_gpu(&CHECK, "gpus: {model: NVIDIA H200}", |gpu| {
            gpu.name = Reading::NotRead("unknown error".to_owned());
        });
        assert_eq!(finding.verdict, Verdict::Error);
    }

    #[test]
    fn fails_with_fewer_multiprocessors_than_its_model_or_its_siblings() {
        let judge = |multiprocessors: u32, change: fn(&mut crate::facts::Facts)| {
            let mut facts = healthy_node();
            let uuid = facts.gpus[2].uuid.value().cloned();
            let Reading::Value(devices) = &mut facts.cuda.devices else {
                panic!("CUDA was read on the healthy node")
            };
            let device = devices
                .iter_mut()
                .find(|it| Some(&it.uuid) == uuid.as_ref());
            device.expect("CUDA has the GPU").multiprocessors = multiprocessors;
            change(&mut facts);
            judge_check(&CHECK, &facts, "{}").swap_remove(2).verdict
        };
        assert_eq!(judge(132, |_| {}), Verdict::Pass);
        assert_eq!(judge(130, |_| {}), Verdict::Fail);
        let share = |facts: &mut crate::facts::Facts| {
            let Reading::Value(environment) = &mut facts.host.environment else {
                panic!("the healthy node has an environment")
            };
            environment.insert(super::MPS_SHARE.to_owned(), "50".to_owned());
        };
        assert_eq!(judge(66, share), Verdict::Pass);
    }
}
