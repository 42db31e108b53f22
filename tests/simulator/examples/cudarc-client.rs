//! A program on cudarc's safe layer, as others write it: `tests/cudarc.rs` starts it on simulated
//! nodes. Prints what it saw.

use anyhow::{Context, Result, ensure};
use cudarc::driver::{CudaContext, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

const CHECK_PTX: &str = include_str!("../../../validator/src/workload/check/check.ptx");
const COUNT: u32 = 1000;

fn main() -> Result<()> {
    let count = CudaContext::device_count()?;
    println!("{count} devices");
    let mut values = Vec::new();
    for ordinal in 0..usize::try_from(count)? {
        // Two owners of one primary context; the first goes before the second is used.
        let first = CudaContext::new(ordinal)?;
        let context = CudaContext::new(ordinal)?;
        drop(first);
        println!("{}: {}", ordinal, context.name()?);
        values.push(run(&context, 7)?);
        let (free, total) = context.mem_get_info()?;
        ensure!(
            0 < free && free <= total,
            "{free} of {total} bytes are free"
        );
    }
    let first = values.first().context("no device")?;
    ensure!(values.iter().all(|it| it == first), "the devices disagree");
    ensure!(
        first.iter().any(|value| *value != 0),
        "nothing was computed"
    );
    Ok(())
}

/// The check kernel's values, through a stream of its own and memory that is taken and given back
/// in its order.
fn run(context: &std::sync::Arc<CudaContext>, seed: u32) -> Result<Vec<u32>> {
    let stream = context.new_stream()?;
    let module = context.load_module(Ptx::from_src(CHECK_PTX))?;
    let kernel = module.load_function("gpu_validator_check")?;
    let sent: Vec<u32> = (0..COUNT).collect();
    let received = stream.clone_dtoh(&stream.clone_htod(&sent)?)?;
    ensure!(received == sent, "a copy differs from what was sent");
    let mut out = stream.alloc_zeros::<u32>(usize::try_from(COUNT)?)?;
    let config = LaunchConfig {
        grid_dim: (COUNT.div_ceil(256), 1, 1),
        block_dim: (256, 1, 1),
        shared_mem_bytes: 0,
    };
    let mut launch = stream.launch_builder(&kernel);
    launch.arg(&mut out).arg(&COUNT).arg(&seed);
    #[allow(unsafe_code, reason = "the kernel's parameters are these three")]
    // SAFETY: as the kernel's PTX declares them, and `out` holds `COUNT` values.
    unsafe {
        launch.launch(config)?;
    }
    let values = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    Ok(values)
}
