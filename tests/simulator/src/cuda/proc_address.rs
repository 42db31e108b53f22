//! `cuGetProcAddress`: from a name without version suffix to the newest function that the caller's
//! CUDA version knows.

use std::ffi::{CStr, c_int, c_void};

/// The CUDA versions from which callers mean `_v2`, `_v3` and `_v4` of a function.
/// Source: `cudaTypedefs.h` of CUDA 13.5, `PFN_cuCtxCreate_v12050` and the like. `_v2` that came
/// with CUDA 3.2 to 4.1, before there was a `cuGetProcAddress`, are those of every caller and not
/// listed.
const VERSIONS: [(&str, &[c_int]); 37] = [
    ("cuCtxCreate", &[3_020, 11_040, 12_050]),
    ("cuCtxGetDevice", &[13_000]),
    ("cuCtxSynchronize", &[13_000]),
    ("cuDeviceGetUuid", &[11_040]),
    ("cuDevicePrimaryCtxRelease", &[11_000]),
    ("cuDevicePrimaryCtxReset", &[11_000]),
    ("cuDevicePrimaryCtxSetFlags", &[11_000]),
    ("cuEventElapsedTime", &[12_080]),
    ("cuGetProcAddress", &[12_000]),
    ("cuGraphAddDependencies", &[12_030]),
    ("cuGraphAddKernelNode", &[12_000]),
    ("cuGraphAddNode", &[12_030, 13_040]),
    ("cuGraphExecKernelNodeSetParams", &[12_000]),
    ("cuGraphExecUpdate", &[12_000]),
    ("cuGraphGetEdges", &[12_030]),
    ("cuGraphInstantiate", &[11_000]),
    ("cuGraphKernelNodeGetParams", &[12_000]),
    ("cuGraphKernelNodeSetParams", &[12_000]),
    ("cuGraphNodeGetDependencies", &[12_030]),
    ("cuGraphNodeGetDependentNodes", &[12_030]),
    ("cuGraphNodeSetParams", &[13_040]),
    ("cuGraphRemoveDependencies", &[12_030]),
    ("cuIpcOpenMemHandle", &[11_000]),
    ("cuLaunchHostFunc", &[13_010]),
    ("cuMemAdvise", &[12_020]),
    ("cuMemPrefetchAsync", &[12_020]),
    ("cuMemcpy3DBatchAsync", &[13_000]),
    ("cuMemcpyBatchAsync", &[13_000]),
    ("cuMulticastBindAddr", &[13_010]),
    ("cuMulticastBindMem", &[13_010]),
    ("cuStreamBatchMemOp", &[11_070]),
    ("cuStreamGetCaptureInfo", &[11_030, 12_030]),
    ("cuStreamGetCtx", &[12_050]),
    ("cuStreamUpdateCaptureDependencies", &[12_030]),
    ("cuStreamWaitValue32", &[11_070]),
    ("cuStreamWriteValue32", &[11_070]),
    ("cuTexRefSetAddress2D", &[3_020, 4_010]),
];

/// Names of the same versions as another function.
const LIKE: [(&str, &str); 2] = [
    ("cuStreamWaitValue64", "cuStreamWaitValue32"),
    ("cuStreamWriteValue64", "cuStreamWriteValue32"),
];

/// The function that a caller of this CUDA version means, unless it is one of those that the
/// scenario takes from the library.
pub(super) fn find(name: &CStr, version: c_int, missing: &[String]) -> Option<*mut c_void> {
    let is_there = |symbol: &String| !missing.contains(symbol);
    candidates(name.to_str().ok()?, version)
        .into_iter()
        .filter(is_there)
        .find_map(|symbol| super::function(&symbol))
}

/// The symbols that a caller of this CUDA version may mean, the newest first.
fn candidates(name: &str, version: c_int) -> Vec<String> {
    let like = LIKE.iter().find(|(other, _)| *other == name);
    let listed = like.map_or(name, |row| row.1);
    let versions = VERSIONS
        .iter()
        .find(|row| row.0 == listed)
        .map_or(&[0][..], |row| row.1);
    let newer = versions.iter().enumerate().rev();
    newer
        .filter(|(_, since)| version >= **since)
        .map(|(place, _)| format!("{name}_v{}", place + 2))
        .chain([name.to_owned()])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn callers_get_what_their_cuda_version_means() {
        assert_eq!(candidates("cuCtxSynchronize", 12_040), ["cuCtxSynchronize"]);
        assert_eq!(
            candidates("cuCtxSynchronize", 13_000)[0],
            "cuCtxSynchronize_v2"
        );
        assert_eq!(candidates("cuCtxCreate", 12_040)[0], "cuCtxCreate_v3");
        assert_eq!(candidates("cuCtxCreate", 12_050)[0], "cuCtxCreate_v4");
        assert_eq!(
            candidates("cuMemAlloc", 11_030),
            ["cuMemAlloc_v2", "cuMemAlloc"]
        );
        assert_eq!(
            candidates("cuStreamWaitValue64", 11_070)[0],
            "cuStreamWaitValue64_v2"
        );
    }

    #[test]
    fn every_listed_version_is_a_function() {
        for (name, versions) in VERSIONS {
            for number in 2..2 + versions.len() {
                // The first API's functions, for addresses of 32 bits, are exported under no name.
                let symbol = format!("{name}_v{number}");
                let is_old = versions[number - 2] < 5_000;
                assert!(
                    is_old || crate::cuda::function(&symbol).is_some(),
                    "{symbol}"
                );
            }
        }
    }
}
