//! The runner's image put to use: its hooks and its compilers, as its own user and with its own
//! environment.

use anyhow::{Context as _, ensure};
use xshell::{Shell, cmd};

use super::runner_dockerfile;

/// Two builds of one file with the image's own settings: the second finds in the cache whatever the
/// first compiled.
const COMPILE: &str = r#"
set -euo pipefail
cd "$(mktemp --directory)"
printf 'int main(void) { return 0; }\n' >main.c
printf 'cmake_minimum_required(VERSION 3.18)\nproject(image C)\nadd_executable(image main.c)\n' >CMakeLists.txt
for folder in first second; do
  cmake -S . -B "$folder" >/dev/null
  test -f "$folder/build.ninja"
  cmake --build "$folder" >/dev/null
  "$folder/image"
done
[ "$(command -v gcc)" = /usr/lib/ccache/gcc ]
ccache --print-stats
"#;

/// What a job's hook does where there is no GPU: it stops the job, and leaves its mark where the
/// image keeps such marks.
const REFUSED_JOB: &str = r#"
set -euo pipefail
export GITHUB_ACTIONS=true RUNNER_NAME=image
printf '#!/bin/sh\nexec gpu-validator "$@" --settings /tmp/hook.env\n' >/tmp/hooked
echo GPU_VALIDATOR_HOOK_QUARANTINE_ON=not-judged >/tmp/hook.env
chmod 0755 /tmp/hooked && chmod 0644 /tmp/hook.env
export GPU_VALIDATOR_BINARY=/tmp/hooked
code=0
"$ACTIONS_RUNNER_HOOK_JOB_STARTED" || code=$?
"$ACTIONS_RUNNER_HOOK_JOB_COMPLETED"
test -s /var/lib/gpu-validator/quarantine-image.json
exit "$code"
"#;

/// Of the validator where no GPU could be judged.
const EXIT_CODE_NOT_JUDGED: i32 = 2;

pub(super) fn check(shell: &Shell, image: &str) -> anyhow::Result<()> {
    let container = cmd!(shell, "buildah from --pull-never {image}")
        .quiet()
        .read()?;
    let checked = look(shell, &container);
    cmd!(shell, "buildah rm {container}")
        .quiet()
        .ignore_stdout()
        .run()?;
    checked
}

fn look(shell: &Shell, container: &str) -> anyhow::Result<()> {
    let said = |script: &str| run(shell, container, script, 0);
    let user = said("id --user; id --user --name; pwd; gpu-validator --version")?;
    ensure!(
        user.starts_with("1001\nrunner\n/opt/actions-runner\ngpu-validator "),
        "a job would find itself as\n{user}"
    );
    said("test -x run.sh && test -w . && test ! -w /usr/bin/gpu-validator && test ! -w /opt/gpu-bringup/hooks")
        .context("a job could change what watches it, or the runner could not be registered")?;

    // With the nvidia runtime as default, the image's own wish would give a pod without a limit
    // every GPU.
    said("test -z \"${NVIDIA_VISIBLE_DEVICES:-}\"").context("the image asks for GPUs by itself")?;

    let refused = run(shell, container, REFUSED_JOB, EXIT_CODE_NOT_JUDGED)?;
    ensure!(
        refused.contains("::error title=infrastructure%3A GPU runner not fit for work::"),
        "the hook before a job said\n{refused}"
    );

    let statistics = said(COMPILE)?;
    let counted = |counter: &str| {
        let number = |line: &str| line.strip_prefix(counter)?.trim().parse::<u32>().ok();
        statistics.lines().find_map(number).unwrap_or(0)
    };
    let (misses, hits) = (counted("cache_miss\t"), counted("direct_cache_hit\t"));
    ensure!(
        misses > 0 && hits == misses,
        "the second build of a file did not find what the first compiled, ccache counts\n{statistics}"
    );
    said("test -n \"$(find \"$CCACHE_DIR\" -type f -name '*R')\"")
        .context("what was compiled is not below CCACHE_DIR")?;

    let installed = said("cat /stand-ins.log")?;
    for wanted in wanted_installations(shell)? {
        ensure!(
            installed.lines().any(|line| line.contains(&wanted)),
            "nothing installs `{wanted}`; what was called:\n{installed}"
        );
    }
    Ok(())
}

/// Requests that package managers must have received, with the versions of the Dockerfile's
/// arguments.
fn wanted_installations(shell: &Shell) -> anyhow::Result<Vec<String>> {
    let argument = |name| runner_dockerfile::argument(shell, name);
    let (cuda, cudnn) = (argument("CUDA_VERSION")?, argument("CUDNN_VERSION")?);
    let major = cuda.split('.').next().unwrap_or_default();
    let toolkit = format!("cuda-toolkit-{}", cuda.replace('.', "-"));
    Ok(vec![
        format!(
            "pip3 install --no-cache-dir cmake=={} ninja=={} numpy=={} pyyaml=={}",
            argument("CMAKE_VERSION")?,
            argument("NINJA_VERSION")?,
            argument("NUMPY_VERSION")?,
            argument("PYYAML_VERSION")?
        ),
        format!("{toolkit} libcudnn9-cuda-{major}={cudnn}-1 libcudnn9-dev-cuda-{major}={cudnn}-1"),
        format!("apt-mark hold {toolkit} libcudnn9-cuda-{major} libcudnn9-dev-cuda-{major}"),
    ])
}

/// What a script prints in a container of the image, as the image's user.
fn run(shell: &Shell, container: &str, script: &str, expected: i32) -> anyhow::Result<String> {
    let output = cmd!(
        shell,
        "buildah run --isolation=chroot {container} -- /bin/bash -c {script}"
    )
    .quiet()
    .ignore_status()
    .output()?;
    let stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(
        output.status.code() == Some(expected),
        "ended with {}, expected {expected}: {script}\n{stdout}{}",
        output.status,
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(stdout)
}
