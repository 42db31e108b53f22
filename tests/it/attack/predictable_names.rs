//! Names that another user of the machine can guess, and what that user puts there (threat model:
//! T2).

use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::node::{Node, Scratch, said, validator};

fn open_to_all(folder: &Path) {
    std::fs::create_dir_all(folder).expect("made");
    std::fs::set_permissions(folder, std::fs::Permissions::from_mode(0o777)).expect("chmod");
}

fn pipe(path: &Path) {
    let status = Command::new("mkfifo").arg(path).status();
    assert!(status.expect("mkfifo").success());
}

/// Runs a command that an attack once made wait for ever.
fn said_in_time(command: &mut Command) -> (i32, String, String) {
    let started = Instant::now();
    let said = said(command);
    assert!(started.elapsed() < Duration::from_secs(20), "{said:?}");
    said
}

#[test]
fn a_forged_run_file_makes_burn_stop_kill_no_process() {
    let out = Scratch::new();
    let folder = out.path("run");
    open_to_all(&folder);
    let mut victim = Command::new("sleep").arg("60").spawn().expect("sleep");
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", victim.id())).expect("stat");
    let after = stat.rsplit_once(") ").expect("a name").1;
    let ticks: u64 = after
        .split(' ')
        .nth(19)
        .and_then(|it| it.parse().ok())
        .expect("field 22");
    let forged = json!({
        "pid": victim.id(), "started_ticks": ticks, "gpus": ["GPU-a"], "duration_s": 1.0,
        "progress": ["\u{1b}]0;owned\u{7}"], "log": null,
    });
    let name = format!("burn-{}.json", victim.id());
    std::fs::write(folder.join(name), forged.to_string()).expect("written");
    for subcommand in ["stop", "status"] {
        let mut burn = validator();
        burn.args(["burn", subcommand])
            .env("GPU_VALIDATOR_RUNTIME_DIR", &folder);
        let (code, stdout, stderr) = said_in_time(&mut burn);
        assert_eq!(code, 3, "{subcommand}: {stdout}{stderr}");
        assert!(stderr.contains("other users can write to it"), "{stderr}");
        assert!(stderr.contains("run"), "{stderr}");
        assert!(!stdout.contains('\u{1b}'), "{stdout}");
    }
    assert!(victim.try_wait().expect("asked").is_none(), "it lives");
    victim.kill().expect("killed");
    victim.wait().expect("reaped");
}

#[test]
fn special_files_in_the_runtime_folder_are_not_read() {
    let out = Scratch::new();
    let folder = out.path("run");
    std::fs::create_dir_all(&folder).expect("made");
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o700)).expect("chmod");
    pipe(&folder.join("burn-1.json"));
    symlink("/dev/zero", folder.join("burn-2.json")).expect("linked");
    let large = std::fs::File::create(folder.join("burn-3.json")).expect("made");
    large.set_len(1 << 40).expect("sparse");
    let mut status = validator();
    status
        .args(["burn", "status"])
        .env("GPU_VALIDATOR_RUNTIME_DIR", &folder);
    let (code, stdout, _) = said_in_time(&mut status);
    assert_eq!((code, stdout.as_str()), (0, "no burn is running\n"));
}

#[test]
fn a_pipe_or_device_in_the_state_folder_holds_up_no_hook() {
    let node = Node::healthy("h200x1");
    let state = node.out.path("state");
    let hook = |name: &str| {
        let mut hook = node.validator();
        hook.args(["hook", name, "--state"]).arg(&state);
        hook.arg("--simulated-ok").env("RUNNER_NAME", "r");
        if name == "pre-job" {
            hook.args(["--burn", "0", "--sysroot"]);
            hook.arg(node.sysroot());
        }
        said_in_time(&mut hook)
    };
    let places: [fn(&Path); 3] = [
        pipe,
        |path| symlink("/dev/zero", path).expect("linked"),
        |path| std::fs::create_dir_all(path).expect("made"),
    ];
    for place in places {
        std::fs::create_dir_all(&state).expect("made");
        place(&state.join("job-r.json"));
        let (_, _, stderr) = hook("post-job");
        assert!(stderr.contains("job-r.json"), "{stderr}");
        // A directory is nothing that a hook removes.
        if !state.join("job-r.json").is_dir() {
            let (code, stdout, stderr) = hook("pre-job");
            assert_eq!(code, 0, "{stdout}{stderr}");
        }
        std::fs::remove_dir_all(&state).expect("removed");
        std::fs::create_dir_all(&state).expect("made");
        place(&state.join("quarantine"));
        let (code, _, stderr) = hook("pre-job");
        assert_eq!(code, 1, "it holds, whatever it is: {stderr}");
        std::fs::remove_dir_all(&state).expect("removed");
    }
    open_to_all(&state);
    let (code, _, stderr) = hook("pre-job");
    assert_eq!(code, 2, "{stderr}");
    assert!(stderr.contains("other users can write to it"), "{stderr}");
}

#[test]
fn a_report_follows_no_link_that_another_user_planted() {
    let own = Command::new("id").arg("-u").output().expect("id").stdout;
    if own != b"0\n" {
        // Only root can make a link that belongs to another user.
        println!("not root: the links of another user cannot be made");
        return;
    }
    let node = Node::healthy("h200x1");
    let precious = node.out.write("precious", "precious");
    let link = node.out.path("report.json");
    symlink(&precious, &link).expect("linked");
    let status = Command::new("chown")
        .args(["-h", "65534"])
        .arg(&link)
        .status();
    assert!(status.expect("chown").success());
    let mut run = node.run_command(&["--level", "quick"]);
    let (code, _, stderr) = said(&mut run);
    assert_eq!(code, 3, "{stderr}");
    assert!(stderr.contains("a symbolic link of user 65534"), "{stderr}");
    assert_eq!(node.out.read("precious"), "precious");
}

#[test]
fn the_name_of_a_temporary_report_cannot_be_guessed() {
    let node = Node::healthy("h200x1");
    let precious = node.out.write("precious", "precious");
    // `.report.json.<pid>.tmp` was followed: every number that a run may get leads to the file.
    let shell = "for n in $(seq $(($$ + 1)) $(($$ + 400))); do ln -s precious .report.json.$n.tmp; done; exec \"$@\"";
    let run = node.run_command(&["--level", "quick"]);
    let mut command = crate::node::in_place_of(&run, "sh");
    command
        .args(["-c", shell, "sh"])
        .arg(run.get_program())
        .args(run.get_args())
        .current_dir(precious.parent().expect("a folder"));
    let (code, stdout, stderr) = said(&mut command);
    assert_eq!(code, 0, "{stdout}{stderr}");
    assert_eq!(node.out.read("precious"), "precious");
}
