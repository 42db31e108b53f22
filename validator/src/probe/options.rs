//! How a machine is looked at.

use std::path::PathBuf;
use std::time::Duration;

use validator_core::level::Level;
use validator_core::profile::KubernetesProfile;

/// How a machine is looked at.
#[derive(Clone, Debug)]
pub(crate) struct ProbeOptions {
    pub level: Level,
    /// Host files are read below this folder; `None` is the machine itself. Below a sysroot there
    /// is no network request but to the Kubernetes API, and no program is run to read a log.
    pub sysroot: Option<PathBuf>,
    /// systemd services to read in addition to NVIDIA's own, by unit name without `.service`.
    pub services: Vec<String>,
    /// Files that level image looks for, by absolute path.
    pub image_files: Vec<String>,
    /// Whether instance metadata may be requested; even then only on a machine whose DMI tables
    /// name EC2.
    pub ec2_metadata: bool,
    /// The queries of kubelet and API server, at level standard and above. The API server is
    /// queried below a sysroot, too: a container may have the host's files there.
    pub kubernetes: KubernetesProfile,
    /// Python environments that level standard starts, besides those that it chooses itself.
    pub pythons: Vec<String>,
    pub deadlines: Deadlines,
    /// The program that is started as `PROGRAM worker …`; `None` is this program.
    pub worker_program: Option<PathBuf>,
}

impl Default for ProbeOptions {
    fn default() -> Self {
        Self {
            level: Level::default(),
            sysroot: None,
            services: Vec::new(),
            image_files: Vec::new(),
            ec2_metadata: true,
            kubernetes: KubernetesProfile::default(),
            pythons: Vec::new(),
            deadlines: Deadlines::default(),
            worker_program: None,
        }
    }
}

/// How long a driver, kubelet or API server may take to answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    /// One NVML call.
    pub nvml_call: Duration,
    /// `nvmlInit` and opening a GPU: without persistence mode the driver initialises the GPU in
    /// these calls, seconds each.
    pub nvml_initialization: Duration,
    /// All NVML queries, restarts after a hang or crash included.
    pub nvml: Duration,
    /// `cuInit` and its purpose; initialises every GPU, too.
    pub cuda: Duration,
    /// The check kernel on one GPU, start of its process included; and each step in which a burn's
    /// worker gets ready, where the driver makes the contexts of all GPUs one after another (seen
    /// on eight H200s: 10 s).
    pub cuda_kernel: Duration,
    /// From one report of a worker that multiplies to the next. It promises one each half second
    /// (`workload::gemm::intervals::INTERVAL_S`): ten that are missing in a row are no delay of a
    /// busy host.
    pub burn_report: Duration,
    /// The whole run.
    pub run: Option<Duration>,
    /// One answer of the kubelet or a device plugin; they answer within milliseconds.
    pub kubelet_call: Duration,
    /// One answer of the API server.
    pub api_call: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            nvml_call: Duration::from_secs(5),
            nvml_initialization: Duration::from_secs(30),
            nvml: Duration::from_secs(90),
            cuda: Duration::from_secs(30),
            cuda_kernel: Duration::from_secs(30),
            burn_report: Duration::from_secs(5),
            run: None,
            kubelet_call: Duration::from_secs(5),
            api_call: Duration::from_secs(10),
        }
    }
}

impl Deadlines {
    /// At level quick the whole verdict is there within 30 s, whatever the driver does: NVML and
    /// CUDA are read in parallel.
    pub(crate) fn of(level: Level) -> Self {
        let whole = Self::default();
        if level != Level::Quick {
            return whole;
        }
        Self {
            // Two GPUs whose initialization hangs leave time for the others.
            nvml_initialization: Duration::from_secs(10),
            nvml: Duration::from_secs(25),
            cuda: Duration::from_secs(25),
            ..whole
        }
    }

    /// Every deadline times `factor`, for tests in which a driver hangs.
    #[must_use]
    pub(crate) fn scaled(self, factor: f64) -> Self {
        let scaled = |deadline: Duration| {
            Duration::try_from_secs_f64(deadline.as_secs_f64() * factor).unwrap_or(deadline)
        };
        Self {
            nvml_call: scaled(self.nvml_call),
            nvml_initialization: scaled(self.nvml_initialization),
            nvml: scaled(self.nvml),
            cuda: scaled(self.cuda),
            cuda_kernel: scaled(self.cuda_kernel),
            burn_report: scaled(self.burn_report),
            // Not a driver's: it holds whatever the driver does.
            run: self.run,
            kubelet_call: scaled(self.kubelet_call),
            api_call: scaled(self.api_call),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_deadline_is_scaled_and_a_senseless_factor_changes_none() {
        let whole = Deadlines::default();
        let tenth = whole.scaled(0.1);
        assert_eq!(tenth.nvml_call, Duration::from_millis(500));
        assert_eq!(tenth.nvml_initialization, Duration::from_secs(3));
        assert_eq!(tenth.nvml, Duration::from_secs(9));
        assert_eq!(tenth.cuda, Duration::from_secs(3));
        assert_eq!(tenth.cuda_kernel, Duration::from_secs(3));
        assert_eq!(tenth.burn_report, Duration::from_millis(500));
        assert_eq!(tenth.kubelet_call, Duration::from_millis(500));
        assert_eq!(tenth.api_call, Duration::from_secs(1));
        assert_eq!(whole.scaled(f64::NAN).cuda, whole.cuda);
        assert_eq!(whole.scaled(-1.0).cuda, whole.cuda);
    }
}
