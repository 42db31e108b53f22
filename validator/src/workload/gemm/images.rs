//! The kernels' images, embedded by architecture, and which of them a GPU and its driver take.

use crate::cuda::{Context, CudaFailure, Module};

/// Answers of a driver that does not take an image, where another may do.
// Source: cuda.h, CUDA_ERROR_INVALID_IMAGE, …NO_BINARY_FOR_GPU, …INVALID_PTX,
// …JIT_COMPILER_NOT_FOUND, …UNSUPPORTED_PTX_VERSION, …JIT_COMPILATION_DISABLED.
const IMAGE_REFUSED: [u32; 6] = [200, 209, 218, 221, 222, 223];

/// One source file's kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Family {
    Support,
    Sm70,
    Sm80,
    Sm89,
    Sm90a,
}

/// What the driver took.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Image {
    Cubin,
    /// Translated by the driver.
    Ptx,
}

impl std::fmt::Display for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cubin => "cubin",
            Self::Ptx => "PTX that the driver translated",
        })
    }
}

/// A deflated cubin and the compute capability that it is built for; newer minor versions of the
/// same major one run it, too.
type Cubin = ((u32, u32), &'static [u8]);

/// A file of `workload/gemm/built`, deflated by `build.rs`.
macro_rules! built {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/kernels/", $name))
    };
}

fn inflate(deflated: &[u8]) -> Vec<u8> {
    miniz_oxide::inflate::decompress_to_vec(deflated).expect("build.rs deflated it")
}

impl Family {
    /// As reports name it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Support => "support",
            Self::Sm70 => "sm_70",
            Self::Sm80 => "sm_80",
            Self::Sm89 => "sm_89",
            Self::Sm90a => "sm_90a",
        }
    }

    /// Whether a GPU of this compute capability can run it.
    pub(crate) fn runs_on(self, capability: (u32, u32)) -> bool {
        match self {
            Self::Support | Self::Sm70 => capability >= (7, 0),
            Self::Sm80 => capability >= (8, 0),
            Self::Sm89 => capability >= (8, 9),
            // Kernels of an "a" architecture run on no other, not even a newer one.
            Self::Sm90a => capability == (9, 0),
        }
    }

    fn ptx(self) -> &'static [u8] {
        match self {
            Self::Support => built!("support.ptx"),
            Self::Sm70 => built!("gemm_sm70.ptx"),
            Self::Sm80 => built!("gemm_sm80.ptx"),
            Self::Sm89 => built!("gemm_sm89.ptx"),
            Self::Sm90a => built!("gemm_sm90a.ptx"),
        }
    }

    fn cubins(self) -> Vec<Cubin> {
        match self {
            Self::Support => vec![
                ((8, 0), built!("support.sm_80.cubin")),
                ((9, 0), built!("support.sm_90.cubin")),
                ((10, 0), built!("support.sm_100.cubin")),
                ((12, 0), built!("support.sm_120.cubin")),
            ],
            Self::Sm70 => vec![
                ((8, 0), built!("gemm_sm70.sm_80.cubin")),
                ((9, 0), built!("gemm_sm70.sm_90.cubin")),
                ((10, 0), built!("gemm_sm70.sm_100.cubin")),
                ((12, 0), built!("gemm_sm70.sm_120.cubin")),
            ],
            Self::Sm80 => vec![
                ((8, 0), built!("gemm_sm80.sm_80.cubin")),
                ((9, 0), built!("gemm_sm80.sm_90.cubin")),
                ((10, 0), built!("gemm_sm80.sm_100.cubin")),
                ((12, 0), built!("gemm_sm80.sm_120.cubin")),
            ],
            Self::Sm89 => vec![
                ((8, 9), built!("gemm_sm89.sm_89.cubin")),
                ((10, 0), built!("gemm_sm89.sm_100.cubin")),
                ((12, 0), built!("gemm_sm89.sm_120.cubin")),
            ],
            Self::Sm90a => vec![((9, 0), built!("gemm_sm90a.sm_90a.cubin"))],
        }
    }

    /// The images to try, in their order: cubins need no translation, which takes the driver a
    /// second and more.
    fn images(self, capability: (u32, u32)) -> Vec<&'static [u8]> {
        if !self.runs_on(capability) {
            return Vec::new();
        }
        let fits = |built_for: (u32, u32)| match self {
            Self::Sm90a => built_for == capability,
            _ => built_for.0 == capability.0 && built_for.1 <= capability.1,
        };
        let cubins = self.cubins().into_iter().filter(|(it, _)| fits(*it));
        cubins.map(|(_, image)| image).chain([self.ptx()]).collect()
    }

    /// Loads it; `None` when the driver refuses every image.
    pub(crate) fn load<'c, 'a>(
        self,
        context: &'c Context<'a>,
        capability: (u32, u32),
    ) -> Result<Option<(Module<'c, 'a>, Image)>, CudaFailure> {
        for image in self.images(capability) {
            let mut image = inflate(image);
            let is_cubin = image.starts_with(b"\x7fELF");
            // Text must end in NUL.
            image.push(0);
            match context.load_image(&image) {
                Ok(module) => {
                    let image = if is_cubin { Image::Cubin } else { Image::Ptx };
                    return Ok(Some((module, image)));
                }
                Err(CudaFailure::Status { code, .. }) if IMAGE_REFUSED.contains(&code) => {}
                Err(failure) => return Err(failure),
            }
        }
        Ok(None)
    }
}

/// Why a GPU cannot multiply at all.
pub(super) fn no_kernels((major, minor): (u32, u32)) -> String {
    format!("the driver takes none of the embedded kernels for compute capability {major}.{minor}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn images(family: Family, capability: (u32, u32)) -> Vec<usize> {
        let images = family.images(capability);
        images.iter().map(|it| it.len()).collect()
    }

    #[test]
    fn a_cubin_that_fits_comes_first_and_ptx_last() {
        let ptx = Family::Sm80.ptx().len();
        let a100 = images(Family::Sm80, (8, 0));
        assert_eq!(a100.len(), 2);
        assert_eq!(a100[1], ptx);
        // An L4 runs the A100's cubin.
        assert_eq!(images(Family::Sm80, (8, 9)), a100);
        // A future architecture has the driver translate.
        assert_eq!(images(Family::Sm80, (13, 0)), [ptx]);
        assert!(images(Family::Sm80, (7, 5)).is_empty());
    }

    #[test]
    fn images_are_embedded_as_they_were_built() {
        assert_eq!(
            inflate(Family::Sm90a.ptx()),
            include_bytes!("built/gemm_sm90a.ptx")
        );
        let families = [
            Family::Support,
            Family::Sm70,
            Family::Sm80,
            Family::Sm89,
            Family::Sm90a,
        ];
        for family in families {
            assert!(inflate(family.ptx()).starts_with(b"//"), "{family:?}");
            for (capability, cubin) in family.cubins() {
                assert!(
                    inflate(cubin).starts_with(b"\x7fELF"),
                    "{family:?} {capability:?}"
                );
            }
        }
    }

    #[test]
    fn hopper_kernels_run_on_hopper_alone() {
        assert_eq!(images(Family::Sm90a, (9, 0)).len(), 2);
        assert!(images(Family::Sm90a, (10, 0)).is_empty());
        assert!(images(Family::Sm90a, (8, 9)).is_empty());
    }

    #[test]
    fn turing_and_volta_have_ptx() {
        assert_eq!(
            images(Family::Support, (7, 5)),
            [Family::Support.ptx().len()]
        );
        assert!(images(Family::Support, (6, 1)).is_empty());
    }
}
