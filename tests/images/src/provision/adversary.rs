//! A job on a runner that wants past its gate. Everything that it could try runs as the runner's
//! user, on the files that the provisioners left, with the real sudo and packet filter.

use anyhow::{Context as _, ensure};

use super::{Instance, User, succeeded};

/// What decides whether a job may run, or watches over it.
const PROTECTED: [&str; 18] = [
    "/etc/gpu-bringup",
    "/etc/gpu-bringup/actions-runner-metadata.nft",
    "/etc/gpu-validator",
    "/etc/gpu-validator/environment",
    "/etc/gpu-validator/profiles/g6.yaml",
    "/etc/sudoers.d/gpu-bringup-actions-runner",
    "/etc/systemd/system/actions-runner.service",
    "/etc/systemd/system/gpu-validator-firstboot.service",
    "/opt/actions-runner/.env",
    "/opt/actions-runner/bin",
    "/opt/actions-runner/bin/installdependencies.sh",
    "/opt/actions-runner/run.sh",
    "/opt/gpu-bringup/hooks",
    "/opt/gpu-bringup/hooks/post-job.sh",
    "/opt/gpu-bringup/hooks/pre-job.sh",
    "/usr/bin/gpu-validator",
    "/usr/libexec/gpu-bringup/actions-runner-job-hook.sh",
    "/var/lib/gpu-validator",
];

/// Ways to change a file or folder `$1`; each must fail.
const CHANGES: &str = r#"
append() { if [ -d "$1" ]; then touch "$1/new"; else echo x >>"$1"; fi; }
replace() { echo x >/tmp/x && mv --force /tmp/x "$1"; }
move() { mv "$1" "$1.old"; }
remove() { rm --recursive --force "$1"; }
open() { chmod a+w "$1"; }
for way in append replace move remove open; do
  if "$way" "$1" 2>/dev/null; then echo "$way"; fi
done
"#;

const HOOK: &str = "/usr/libexec/gpu-bringup/actions-runner-job-hook.sh";

/// Of the validator where no GPU could be judged.
const NOT_JUDGED: i32 = 2;

pub(super) fn check(instance: &Instance) -> anyhow::Result<()> {
    may_read_the_kernel_log(instance)?;
    the_runner_works(instance)?;
    let job = |script: &str| instance.bash(User::Runner, &[], script);
    for path in PROTECTED {
        succeeded(&instance.bash(User::Root, &[], &format!("test -e {path}"))?)
            .with_context(|| format!("{path} is not there"))?;
        let ways = succeeded(&job(&format!("set -- {path}\n{CHANGES}"))?)?;
        ensure!(ways.is_empty(), "a job can change {path}: {ways}");
    }
    jobs_find_what_they_expect(instance)?;
    sudo_is_for_the_hooks(instance)?;
    the_quarantine_stays(instance)?;
    the_metadata_service_is_closed(instance)?;
    the_registration_is_roots(instance)
}

fn may_read_the_kernel_log(instance: &Instance) -> anyhow::Result<()> {
    let groups = succeeded(&instance.bash(User::Runner, &[], "id --groups --name")?)?;
    ensure!(
        groups.contains("systemd-journal") && groups.contains("adm"),
        "the job's user may not read the kernel log, so that no gate is judged: {groups}"
    );
    Ok(())
}

/// Files that the runner writes next to its programs: registration, logs, the copy of its helper
/// (`run.sh`), and the job's folder.
fn the_runner_works(instance: &Instance) -> anyhow::Result<()> {
    let script = "cd /opt/actions-runner && echo x >.runner && echo y >.runner && echo x >.credentials && \
        cp -f run.sh run-helper.sh && cp -f run.sh run-helper.sh && touch _diag/log && mkdir _work/repository";
    succeeded(&instance.bash(User::Runner, &[], script)?)
        .context("the runner cannot write what it must")?;
    Ok(())
}

/// The packages that GPU jobs expect, and a cache of the compiler on a volume where there is one.
fn jobs_find_what_they_expect(instance: &Instance) -> anyhow::Result<()> {
    let installed = instance.read("/simulated/installed")?;
    for package in ["ccache", "python3-numpy", "python3-yaml"] {
        ensure!(
            installed.lines().any(|it| it == package),
            "{package} is not installed"
        );
    }
    let environment = instance.read("/opt/actions-runner/.env")?;
    let folder = environment
        .lines()
        .find_map(|it| it.strip_prefix("CCACHE_DIR="))
        .context("jobs are given no CCACHE_DIR")?;
    let compile = format!("mkdir {folder}/0 && rmdir {folder}/0");
    succeeded(&instance.bash(User::Runner, &[], &compile)?)
        .context("a job cannot write to the compiler's cache")?;
    let table = instance.read("/etc/fstab")?;
    let fields = table
        .lines()
        .map(|it| it.split_whitespace().collect::<Vec<_>>())
        .find(|it| it.get(1) == Some(&folder))
        .context("no volume is mounted for the compiler's cache")?;
    ensure!(
        fields.len() == 6 && fields[0].starts_with("LABEL="),
        "a line of /etc/fstab is {fields:?}"
    );
    for option in ["nofail", "nodev", "nosuid"] {
        ensure!(
            fields[3].split(',').any(|it| it == option),
            "the volume of the compiler's cache is mounted without {option}: an instance without one does not start, \
             or a job's file on it has rights of another"
        );
    }
    Ok(())
}

fn sudo_is_for_the_hooks(instance: &Instance) -> anyhow::Result<()> {
    // Its package configures PAM when it is installed for real.
    let prepare = "echo 'account required pam_permit.so' >/etc/pam.d/sudo && echo 'session required pam_permit.so' >>/etc/pam.d/sudo && \
        grep --quiet '^@includedir /etc/sudoers.d' /etc/sudoers && chown root:root /etc/sudoers /etc/sudoers.d && \
        echo GPU_VALIDATOR_HOOK_QUARANTINE_ON=not-judged >>/etc/gpu-validator/environment";
    succeeded(&instance.bash(User::Root, &[], prepare)?)?;
    for command in [
        "true".to_owned(),
        "/usr/bin/gpu-validator hook release".to_owned(),
        format!("{HOOK} release"),
        format!("{HOOK} pre-job --fail-on never"),
        format!("GPU_VALIDATOR_HOOK_FAIL_ON=never {HOOK} pre-job"),
        format!("--preserve-env=GPU_VALIDATOR_PROFILE {HOOK} pre-job"),
        format!("--user=nobody {HOOK} pre-job"),
        format!("--chdir=/tmp {HOOK} pre-job"),
    ] {
        let output = instance.bash(
            User::Runner,
            &[],
            &format!("/usr/bin/sudo --non-interactive {command}"),
        )?;
        let text = String::from_utf8_lossy(&output.stderr);
        ensure!(
            !output.status.success() && text.contains("sudo: "),
            "sudo runs `{command}` for a job: {}\n{text}",
            output.status
        );
    }
    // The job's own output is passed on; where its summary lies, and what changes a verdict, is
    // not.
    let output = instance.bash(
        User::Runner,
        &[
            "GITHUB_ACTIONS=true".to_owned(),
            "RUNNER_NAME=gpu-1".to_owned(),
            "GITHUB_STEP_SUMMARY=/etc/summary".to_owned(),
            "GPU_VALIDATOR_HOOK_FAIL_ON=never".to_owned(),
            "GPU_VALIDATOR_HOOK_STATE=/tmp/state".to_owned(),
            "GPU_VALIDATOR_PROFILE=/tmp/profile.yaml".to_owned(),
            "LD_PRELOAD=/tmp/none.so".to_owned(),
        ],
        "/opt/gpu-bringup/hooks/pre-job.sh",
    )?;
    ensure!(
        output.status.code() == Some(NOT_JUDGED),
        "the hook ended with {}, expected {NOT_JUDGED} where there is no GPU\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    succeeded(&instance.bash(
        User::Root,
        &[],
        "test ! -e /etc/summary && test ! -e /tmp/state",
    )?)
    .context("root wrote a file that the job named")?;
    Ok(())
}

/// The hook above has quarantined the runner.
fn the_quarantine_stays(instance: &Instance) -> anyhow::Result<()> {
    const MARK: &str = "/var/lib/gpu-validator/quarantine-gpu-1.json";
    let owner = succeeded(&instance.bash(User::Root, &[], &format!("stat --format=%U {MARK}"))?)?;
    ensure!(owner.trim() == "root", "{MARK} is {owner}'s");
    let ways =
        succeeded(&instance.bash(User::Runner, &[], &format!("set -- {MARK}\n{CHANGES}"))?)?;
    ensure!(ways.is_empty(), "a job can change {MARK}: {ways}");
    let output = instance.bash(
        User::Runner,
        &[],
        "GPU_VALIDATOR_HOOK_STATE=/var/lib/gpu-validator gpu-validator hook release --runner gpu-1 || gpu-validator hook release",
    )?;
    succeeded(&instance.bash(User::Root, &[], &format!("test -s {MARK}"))?).with_context(|| {
        format!(
            "a job ended its runner's quarantine: {}",
            String::from_utf8_lossy(&output.stdout)
        )
    })?;
    Ok(())
}

/// With something that listens there, on both addresses.
fn the_metadata_service_is_closed(instance: &Instance) -> anyhow::Result<()> {
    const LISTENER: &str = "\
        ip link set lo up && ip address add 169.254.169.254/32 dev lo && ip address add fd00:ec2::254/128 dev lo nodad\n\
        cat >/simulated/listen.py <<'END'\n\
        import socket\n\
        for family, address in ((socket.AF_INET, '169.254.169.254'), (socket.AF_INET6, 'fd00:ec2::254')):\n\
        \x20   listener = socket.socket(family)\n\
        \x20   listener.bind((address, 80))\n\
        \x20   listener.listen(16)\n\
        \x20   globals()[address] = listener\n\
        print('ready', flush=True)\n\
        import time\n\
        time.sleep(600)\n\
        END\n\
        python3 /simulated/listen.py >/simulated/listening 2>&1 </dev/null &\n\
        for attempt in $(seq 50); do grep --quiet ready /simulated/listening && exit; sleep 0.1; done; cat /simulated/listening; exit 1";
    const CONNECT: &str = "for address in 169.254.169.254 fd00:ec2::254; do \
        (exec 3<>\"/dev/tcp/$address/80\") 2>/dev/null && echo \"$address\"; done; true";
    succeeded(&instance.bash(User::Root, &[], LISTENER)?)?;
    let before = succeeded(&instance.bash(User::Runner, &[], CONNECT)?)?;
    ensure!(
        before.lines().count() == 2,
        "this test proves nothing: without a rule a job reaches {before:?}"
    );
    let load = "/usr/sbin/nft --file /etc/gpu-bringup/actions-runner-metadata.nft";
    // Twice: the unit may be restarted.
    succeeded(&instance.bash(User::Root, &[], &format!("{load} && {load}"))?)?;
    let reached = succeeded(&instance.bash(User::Runner, &[], CONNECT)?)?;
    ensure!(
        reached.is_empty(),
        "a job reaches the metadata service at {reached}"
    );
    let reached = succeeded(&instance.bash(User::Root, &[], CONNECT)?)?;
    ensure!(
        reached.lines().count() == 2,
        "root reaches the metadata service only at {reached:?}"
    );
    let flushed = instance.bash(User::Runner, &[], "/usr/sbin/nft flush ruleset")?;
    ensure!(!flushed.status.success(), "a job can remove the rules");
    Ok(())
}

fn the_registration_is_roots(instance: &Instance) -> anyhow::Result<()> {
    const SCRIPT: &str = "/usr/libexec/gpu-bringup/actions-runner-registration.sh";
    const FOLDER: &str = "/run/actions-runner-registration";
    let prepare = format!(
        "mkdir -p {FOLDER} /simulated/ssm /simulated/secretsmanager && chmod 0700 {FOLDER} && \
         echo ZW5jb2RlZA== >/simulated/ssm/_gpu-bringup_runners_1 && echo ZW5jb2RlZA== >/simulated/secretsmanager/runner-1 && \
         echo 'not base64' >/simulated/ssm/other"
    );
    succeeded(&instance.bash(User::Root, &[], &prepare)?)?;
    let fetch = |variable: &str| {
        let variables = [variable.to_owned(), format!("RUNTIME_DIRECTORY={FOLDER}")];
        instance.bash(User::Root, &variables, &format!("umask 0077; {SCRIPT}"))
    };
    for (variable, left) in [
        (
            "JIT_CONFIGURATION_PARAMETER=/gpu-bringup/runners/1",
            "ssm/_gpu-bringup_runners_1",
        ),
        (
            "JIT_CONFIGURATION_SECRET=runner-1",
            "secretsmanager/runner-1",
        ),
    ] {
        let printed = succeeded(&fetch(variable)?)?;
        ensure!(
            !printed.contains("ZW5j"),
            "the configuration is printed: {printed}"
        );
        let file = format!("{FOLDER}/jit-configuration");
        let fetched = instance.read(&file)?;
        ensure!(fetched == "ZW5jb2RlZA==", "{variable}: fetched {fetched:?}");
        let read = instance.bash(User::Runner, &[], &format!("cat {file}"))?;
        ensure!(!read.status.success(), "a job can read {file}");
        succeeded(&instance.bash(
            User::Root,
            &[],
            &format!("test ! -e /simulated/{left} && rm {file}"),
        )?)
        .context("another instance could register with the same configuration")?;
    }
    for wrong in [
        "JIT_CONFIGURATION_PARAMETER=",
        "JIT_CONFIGURATION_PARAMETER=other",
        "JIT_CONFIGURATION_PARAMETER=absent",
    ] {
        ensure!(
            !fetch(wrong)?.status.success(),
            "{wrong} registers a runner"
        );
    }
    Ok(())
}
