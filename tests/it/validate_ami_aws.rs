//! `cargo xtask validate-ami --ami` against moto, which answers for AWS on loopback; the instance
//! is a loopback sshd and the validator a stand-in.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use serde_json::Value;

use crate::processes::{eventually, signal};
use crate::ssh::{Server, UNTIL_TERMINATED, free_port};
use crate::xtask::{program, stand_in, stderr};

const RUN_TAG: &str = "gpu-bringup.dev/validate-ami";

/// The folder of the pinned tools, with moto and the AWS CLI in it.
fn tools() -> &'static Path {
    static TOOLS: OnceLock<PathBuf> = OnceLock::new();
    TOOLS.get_or_init(|| {
        let installed = Command::new(program("xtask"))
            .args(["tools", "moto", "aws-cli"])
            .stdout(Stdio::null())
            .status();
        assert!(
            installed.expect("xtask runs").success(),
            "moto and the AWS CLI could not be installed"
        );
        let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent();
        target.expect("target is above").join("tools")
    })
}

/// An account of its own on a moto of its own.
struct Account {
    server: Server,
    moto: Child,
    port: u16,
    ami: String,
    subnets: Vec<String>,
    security_group: String,
    bystander: String,
}

impl Account {
    fn prepare() -> Account {
        let server = Server::start();
        let port = free_port();
        let log = std::fs::File::create(server.folder.path("moto.log")).expect("a log");
        let moto = Command::new(tools().join("moto/bin/moto_server"))
            .args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .stdout(Stdio::null())
            .stderr(log)
            .spawn();
        let mut account = Account {
            server,
            moto: moto.expect("moto can be started"),
            port,
            ami: String::new(),
            subnets: Vec::new(),
            security_group: String::new(),
            bystander: String::new(),
        };
        eventually("moto to listen", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        let prepared: Value =
            serde_json::from_str(&account.ask(&["prepare"])).expect("JSON of moto_account.py");
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        account.ami = text(&prepared["ami"]);
        account.security_group = text(&prepared["security_group"]);
        account.bystander = text(&prepared["bystander"]);
        account.subnets = prepared["subnets"]
            .as_array()
            .expect("subnets")
            .iter()
            .map(text)
            .collect();
        account
    }

    fn environment(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("AWS_") {
                command.env_remove(name);
            }
        }
        command
            .env(
                "AWS_ENDPOINT_URL",
                format!("http://127.0.0.1:{}", self.port),
            )
            .env("AWS_ACCESS_KEY_ID", "testing")
            .env("AWS_SECRET_ACCESS_KEY", "a-secret-that-no-log-may-show")
            .env("AWS_DEFAULT_REGION", "eu-central-1")
            .env("AWS_EC2_METADATA_DISABLED", "true")
            .env("AWS_CONFIG_FILE", "/dev/null")
            .env("AWS_SHARED_CREDENTIALS_FILE", "/dev/null");
    }

    fn ask(&self, question: &[&str]) -> String {
        let mut command = Command::new(tools().join("moto/bin/python3"));
        command
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/moto_account.py"))
            .args(question);
        self.environment(&mut command);
        let output = command.output().expect("python3 can be started");
        assert!(output.status.success(), "{question:?}: {}", stderr(&output));
        String::from_utf8(output.stdout).expect("text")
    }

    /// Instances of runs in this state, and the volumes of runs.
    fn ours(&self) -> (Vec<Value>, Vec<Value>) {
        let everything: Value =
            serde_json::from_str(&self.ask(&["list"])).expect("JSON of moto_account.py");
        let list = |name: &str| {
            let list = everything[name].as_array().expect(name);
            list.iter()
                .filter(|it| it["tags"][RUN_TAG].is_string())
                .cloned()
                .collect::<Vec<_>>()
        };
        let bystander = everything["instances"]
            .as_array()
            .and_then(|all| all.iter().find(|it| it["id"] == *self.bystander));
        assert_eq!(
            bystander.expect("the bystander's instance")["state"],
            "running",
            "an instance of somebody else was touched"
        );
        (list("instances"), list("volumes"))
    }

    fn living(&self) -> Vec<Value> {
        let (instances, _) = self.ours();
        instances
            .into_iter()
            .filter(|it| it["state"] != "terminated")
            .collect()
    }

    /// xtask with an `aws` in front of the real one that writes down its calls and does `after`
    /// each.
    fn xtask(&self, arguments: &[&str], name: &str, after: &str) -> Command {
        let aws = tools().join("aws-cli/bin/aws");
        let calls = self.calls(name);
        let script = format!(
            "#!/bin/sh\ncalls='{}'\nprintf '%s\\n' \"$*\" >>\"$calls\"\nnumber=$(wc -l <\"$calls\")\n\
             before() {{ :; }}; after() {{ :; }}\n{after}\nbefore \"$@\"\n'{}' \"$@\"\ncode=$?\nafter \"$@\"\nexit $code\n",
            calls.display(),
            aws.display()
        );
        let bin = self
            .server
            .folder
            .write_executable(&format!("{name}-bin/aws"), &script);
        let bin = bin.parent().expect("a folder").display().to_string();
        let mut command = Command::new(program("packer-tasks"));
        command.args(arguments).env_remove("NO_COLOR");
        self.environment(&mut command);
        command.env(
            "PATH",
            format!("{bin}:{}", std::env::var("PATH").expect("PATH")),
        );
        command
    }

    fn calls(&self, name: &str) -> PathBuf {
        self.server.folder.path(&format!("{name}.calls"))
    }

    fn validate_ami(&self, stand_in: &Path, name: &str, after: &str) -> Command {
        let mut command = self.xtask(&["validate-ami", "--ami", &self.ami], name, after);
        command
            .arg("--binary")
            .arg(stand_in)
            .arg("--out")
            .arg(self.reports(name))
            .arg("--ssh-config")
            .arg(self.server.folder.path("ssh_config"));
        command
    }

    fn reports(&self, name: &str) -> PathBuf {
        self.server.folder.path(&format!("{name}-reports"))
    }

    fn sweep(&self) -> Output {
        let output = self
            .xtask(&["validate-ami", "--sweep"], "sweep", "")
            .output();
        output.expect("xtask runs")
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let _ = self.moto.kill();
        let _ = self.moto.wait();
    }
}

const PASSES: &str = "write_reports \"$@\"; exit 0";

/// With a JUnit report that can be merged.
const PASSES_WITH_JUNIT: &str = r#"write_reports "$@"
while [ $# -gt 0 ]; do
  if [ "$1" = --junit ]; then
    echo '<testsuites><testsuite name="host" tests="1" failures="0" errors="0" skipped="0"><testcase name="driver"/></testsuite></testsuites>' >"$2"
  fi
  shift
done
exit 0"#;

#[test]
fn one_instance_is_launched_safely_judged_and_terminated() {
    let account = Account::prepare();
    let stand_in = stand_in(&account.server.folder, PASSES);
    // Before its boot no user may log in; then only the key in its user data opens it.
    let authorized_keys = account.server.folder.write("user-key.pub", "");
    let xtask = account
        .validate_ami(&stand_in, "plain", "")
        .args([
            "--instance-type",
            "g4dn.xlarge",
            "--spot",
            "--time-limit",
            "45",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("xtask runs");
    eventually("an instance to be launched", || {
        !account.living().is_empty()
    });
    let id = account.living()[0]["id"]
        .as_str()
        .expect("an id")
        .to_owned();
    let user_data = account.ask(&["user-data", &id]);
    let given: Value = serde_json::from_str(
        user_data
            .strip_prefix("#cloud-config\n")
            .expect("cloud-init's first line"),
    )
    .expect("JSON, which is YAML");
    let key = &given["users"][1]["ssh_authorized_keys"][0];
    std::fs::write(authorized_keys, key.as_str().expect("a key")).expect("a file");
    let output = xtask.wait_with_output().expect("xtask ends");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    for name in [
        "report.json",
        "report.junit.xml",
        "facts.json",
        "instance.json",
    ] {
        assert!(account.reports("plain").join(name).exists(), "no {name}");
    }
    let (instances, volumes) = account.ours();
    let [instance] = &*instances else {
        panic!("not one instance: {instances:?}");
    };
    assert_eq!(instance["state"], "terminated");
    assert_eq!(instance["type"], "g4dn.xlarge");
    assert_eq!(instance["tokens"], "required", "IMDSv2");
    assert_eq!(instance["on_shutdown"], "terminate");
    assert_eq!(instance["lifecycle"], "spot");
    assert_eq!(instance["subnet"], *account.subnets[0]);
    assert_eq!(instance["groups"][0], *account.security_group);
    assert!(volumes.is_empty(), "{volumes:?}");
    let calls = std::fs::read_to_string(account.calls("plain")).expect("calls");
    assert!(calls.contains("\"Encrypted\":true"), "{calls}");
    assert!(
        calls.contains("\"IamInstanceProfile\":{\"Name\":\"validation\"}"),
        "{calls}"
    );
    for text in [&calls, &stderr(&output)] {
        assert!(!text.contains("a-secret-that"), "{text}");
    }
    assert!(user_data.contains("--on-active=45min"), "{user_data}");
    assert!(!user_data.contains("PRIVATE KEY"), "{user_data}");
}

/// How a run ends whose process is killed after each of its calls to AWS, and while the validator
/// runs.
#[test]
fn killed_at_every_step_and_swept_after_nothing_is_left() {
    let account = Account::prepare();
    let folder = &account.server.folder;
    let passes = stand_in(folder, PASSES);
    let output = account
        .validate_ami(&passes, "whole", "")
        .output()
        .expect("xtask runs");
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let calls = std::fs::read_to_string(account.calls("whole")).expect("calls");
    let steps = calls.lines().count();
    let launch = 1 + calls
        .lines()
        .position(|it| it.contains("run-instances"))
        .expect("a launch");
    let end = 1 + calls
        .lines()
        .position(|it| it.contains("terminate-instances"))
        .expect("an end");
    assert!(launch < end && end <= steps, "{calls}");

    for step in 1..=steps {
        let name = format!("killed-{step}");
        let kill = format!("after() {{ [ \"$number\" = {step} ] && kill -KILL $PPID; }}");
        let output = account
            .validate_ami(&passes, &name, &kill)
            .output()
            .expect("xtask runs");
        assert_eq!(
            output.status.code(),
            None,
            "step {step}: {}",
            stderr(&output)
        );
    }
    // While the validator runs: it kills the xtask that started it, and not through any call to
    // AWS.
    let pid_file = folder.path("xtask.pid");
    let killer = folder.write_executable(
        "killer",
        &format!(
            "#!/bin/sh\nkill -KILL \"$(cat '{}')\"\nsleep 1\n",
            pid_file.display()
        ),
    );
    let mut xtask = account
        .validate_ami(&killer, "killed-running", "")
        .stderr(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .expect("xtask runs");
    std::fs::write(&pid_file, xtask.id().to_string()).expect("a file");
    assert_eq!(xtask.wait().expect("xtask ends").code(), None);

    // Killed after the launch and before the end: that many instances live on, and no more.
    assert_eq!(account.living().len(), end - launch + 1);
    account.ask(&["stray-volume"]);
    let swept = account.sweep();
    assert_eq!(swept.status.code(), Some(0), "{}", stderr(&swept));
    assert!(
        stderr(&swept).contains("deleted vol-"),
        "{}",
        stderr(&swept)
    );
    assert_eq!(account.living(), Vec::<Value>::new(), "{}", stderr(&swept));
    let (_, volumes) = account.ours();
    assert!(volumes.is_empty(), "{volumes:?}");
    assert!(stderr(&account.sweep()).contains("nothing was left behind"));
}

#[test]
fn ctrl_c_a_dead_terminal_and_a_failure_end_the_instance() {
    let account = Account::prepare();
    let folder = &account.server.folder;
    let waits = stand_in(folder, UNTIL_TERMINATED);
    for name in ["INT", "TERM", "HUP"] {
        let mut xtask = account
            .validate_ami(&waits, name, "")
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("xtask runs");
        let reports = account.reports(name);
        eventually("the validator to run", || {
            std::fs::read_to_string(reports.join("stdout.txt")).is_ok_and(|it| it.contains("ready"))
        });
        // A terminal that is gone takes no more output.
        if name == "HUP" {
            drop((xtask.stdout.take(), xtask.stderr.take()));
        }
        signal(xtask.id(), name);
        let output = xtask.wait_with_output().expect("xtask ends");
        assert_eq!(output.status.code(), Some(2), "{name}: {}", stderr(&output));
        assert!(
            reports.join("report.json").exists(),
            "{name}: {}",
            stderr(&output)
        );
        assert_eq!(account.living(), Vec::<Value>::new(), "{name}");
    }
    let broken = folder.write_executable("broken", "#!/no/such/interpreter\n");
    let output = account
        .validate_ami(&broken, "broken", "")
        .output()
        .expect("xtask runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert_eq!(account.living(), Vec::<Value>::new());
    // The answer to the launch is lost: the instance is found by its tag.
    let lost = "after() { case \"$*\" in *run-instances*) exit 255 ;; esac; }";
    let output = account
        .validate_ami(&broken, "lost", lost)
        .output()
        .expect("xtask runs");
    assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
    assert!(
        stderr(&output).contains("terminated i-"),
        "{}",
        stderr(&output)
    );
    assert_eq!(account.living(), Vec::<Value>::new());
}

#[test]
fn a_matrix_is_judged_type_by_type_and_merged() {
    let account = Account::prepare();
    let folder = &account.server.folder;
    let validator = stand_in(folder, PASSES_WITH_JUNIT);
    // p5 has no capacity in any subnet, g5 none in the first.
    let scarce = format!(
        "lacks() {{ echo 'An error occurred (InsufficientInstanceCapacity) when calling the RunInstances operation: We currently do not have sufficient capacity.' >&2; exit 254; }}\n\
         before() {{ case \"$*\" in *run-instances*p5.48xlarge*) lacks ;; *run-instances*g5.xlarge*{}*) lacks ;; esac; }}",
        account.subnets[0]
    );
    let output = account
        .validate_ami(&validator, "matrix", &scarce)
        .args(["--matrix", "g4dn.xlarge,g5.xlarge,p5.48xlarge"])
        .output()
        .expect("xtask runs");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("--capacity-reservation"), "{said}");
    let reports = account.reports("matrix");
    let read = |name: &str| std::fs::read_to_string(reports.join(name)).expect(name);
    let summary: Value = serde_json::from_str(&read("matrix.json")).expect("JSON");
    assert_eq!(summary["exit_code"], 2);
    assert_eq!(summary["instance_types"][0]["exit_code"], 0);
    assert_eq!(summary["instance_types"][1]["exit_code"], 0);
    assert_eq!(summary["instance_types"][2]["exit_code"], 2);
    let merged = read("matrix.junit.xml");
    let document = roxmltree::Document::parse(&merged).expect("well-formed");
    let root = document.root_element();
    assert_eq!(root.attribute("errors"), Some("1"), "{merged}");
    assert_eq!(root.attribute("tests"), Some("3"), "{merged}");
    assert!(read("matrix.md").contains("| p5.48xlarge | not judged: "));
    let (instances, _) = account.ours();
    let of_g5 = instances.iter().find(|it| it["type"] == "g5.xlarge");
    assert_eq!(of_g5.expect("a g5")["subnet"], *account.subnets[1]);
    assert_eq!(account.living(), Vec::<Value>::new());
}

/// Starts three types side by side; they run until they are stopped.
fn three_at_once(account: &Account, name: &str) -> Child {
    let waits = stand_in(&account.server.folder, UNTIL_TERMINATED);
    let xtask = account
        .validate_ami(&waits, name, "")
        .args(["--matrix", "g6.xlarge,g4dn.xlarge,g5.xlarge"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("xtask runs");
    let reports = account.reports(name);
    for instance_type in ["g6.xlarge", "g4dn.xlarge", "g5.xlarge"] {
        // Each waits for a signal, so that the last one runs only when nothing waited for the
        // first.
        let printed = reports.join(instance_type).join("stdout.txt");
        eventually(&format!("{instance_type} to be judged"), || {
            std::fs::read_to_string(&printed).is_ok_and(|it| it.contains("ready"))
        });
    }
    xtask
}

#[test]
fn a_matrix_runs_side_by_side_and_ends_with_all_its_instances() {
    let account = Account::prepare();
    let xtask = three_at_once(&account, "interrupted");
    assert_eq!(account.living().len(), 3);
    signal(xtask.id(), "INT");
    let output = xtask.wait_with_output().expect("xtask ends");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert_eq!(account.living(), Vec::<Value>::new(), "{said}");
    let reports = account.reports("interrupted");
    let text = std::fs::read_to_string(reports.join("matrix.json")).expect("a summary");
    let summary: Value = serde_json::from_str(&text).expect("JSON");
    let judged = summary["instance_types"].as_array().expect("a list");
    let order: Vec<_> = judged.iter().map(|it| &it["instance_type"]).collect();
    assert_eq!(order, ["g6.xlarge", "g4dn.xlarge", "g5.xlarge"]);
    for instance_type in ["g6.xlarge", "g4dn.xlarge", "g5.xlarge"] {
        assert!(
            reports.join(instance_type).join("report.json").exists(),
            "{instance_type}: {said}"
        );
    }
    let printed = String::from_utf8_lossy(&output.stdout);
    assert!(printed.contains("g4dn.xlarge: stopped"), "{printed}");

    let mut xtask = three_at_once(&account, "killed");
    signal(xtask.id(), "KILL");
    assert_eq!(xtask.wait().expect("xtask ends").code(), None);
    assert_eq!(account.living().len(), 3);
    let swept = account.sweep();
    assert_eq!(swept.status.code(), Some(0), "{}", stderr(&swept));
    assert_eq!(account.living(), Vec::<Value>::new(), "{}", stderr(&swept));
}

#[test]
fn a_type_that_found_the_quota_used_up_is_judged_when_the_others_have_ended() {
    let account = Account::prepare();
    let passes = stand_in(&account.server.folder, PASSES_WITH_JUNIT);
    let asked = account.server.folder.path("asked");
    let used_up = format!(
        "before() {{ case \"$*\" in *run-instances*p5.48xlarge*) [ -e '{0}' ] || {{ : >'{0}'; \
         echo 'An error occurred (VcpuLimitExceeded) when calling the RunInstances operation: no.' >&2; exit 254; }} ;; esac; }}",
        asked.display()
    );
    let output = account
        .validate_ami(&passes, "quota", &used_up)
        .args(["--matrix", "p5.48xlarge,g5.xlarge"])
        .output()
        .expect("xtask runs");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(
        said.contains("p5.48xlarge: again, now that no other"),
        "{said}"
    );
    let (instances, _) = account.ours();
    let types: Vec<_> = instances.iter().map(|it| &it["type"]).collect();
    assert_eq!(types.len(), 2, "{types:?}");
    assert_eq!(types[1], "p5.48xlarge", "it was launched last: {types:?}");
    assert_eq!(account.living(), Vec::<Value>::new());
}

#[test]
fn a_kept_instance_lives_on_and_a_sweep_leaves_it_alone() {
    let account = Account::prepare();
    let stand_in = stand_in(&account.server.folder, PASSES);
    let output = account
        .validate_ami(&stand_in, "kept", "")
        .arg("--keep")
        .output()
        .expect("xtask runs");
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(0), "{said}");
    let (_, command) = said.split_once("to reach it: ").expect("how to reach it");
    let (ssh, _) = command.split_once(';').expect("a command");
    // What is printed works, with the key that was left for it.
    let reached = Command::new("sh")
        .args(["-c", &format!("{ssh} true")])
        .status();
    assert!(reached.expect("sh runs").success(), "{ssh}");
    let swept = stderr(&account.sweep());
    assert!(swept.contains("alone: it belongs to --keep on "), "{swept}");
    assert_eq!(account.living().len(), 1);
    let all = account
        .xtask(&["validate-ami", "--sweep", "--all"], "all", "")
        .output();
    assert!(all.expect("xtask runs").status.success());
    assert_eq!(account.living(), Vec::<Value>::new());
    let configuration = ssh.split_whitespace().nth(2).expect("ssh -F FILE");
    let folder = Path::new(configuration).parent().expect("a folder");
    assert!(folder.join("key").exists(), "the key went with the sweep");
    let _ = std::fs::remove_dir_all(folder);
}

#[test]
fn what_aws_refuses_is_told_with_the_next_step() {
    let account = Account::prepare();
    let stand_in = stand_in(&account.server.folder, PASSES);
    let refused = |name: &str, when: &str, code: &str, next_step: &str| {
        let refuse = format!(
            "before() {{ case \"$*\" in *{when}*) echo 'An error occurred ({code}) when calling the Operation operation: no.' >&2; exit 254 ;; esac; }}"
        );
        let output = account
            .validate_ami(&stand_in, name, &refuse)
            .output()
            .expect("xtask runs");
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        let said = stderr(&output);
        assert!(
            said.contains("; next: ") && said.contains(next_step),
            "{said}"
        );
        assert!(
            !account.reports(name).exists() || when == "run-instances",
            "{name} left a folder"
        );
    };
    refused(
        "quota",
        "run-instances",
        "VcpuLimitExceeded",
        "Service Quotas",
    );
    refused(
        "forbidden",
        "run-instances",
        "UnauthorizedOperation",
        "launcher_policy_arn",
    );
    refused(
        "unprepared",
        "get-parameter",
        "ParameterNotFound",
        "cargo xtask tf apply",
    );
    refused(
        "expired",
        "get-parameter",
        "ExpiredTokenException",
        "aws sso login",
    );
    let mut unknown_ami = account.xtask(
        &[
            "validate-ami",
            "--ami",
            "ami-00000000",
            "--ssh-config",
            "/dev/null",
        ],
        "unknown",
        "",
    );
    let output = unknown_ami.output().expect("xtask runs");
    assert_eq!(output.status.code(), Some(2));
    assert!(
        stderr(&output).contains("there is no such AMI in this region"),
        "{}",
        stderr(&output)
    );
    let mut nobody = account.validate_ami(&stand_in, "nobody", "");
    nobody
        .env_remove("AWS_ACCESS_KEY_ID")
        .env_remove("AWS_SECRET_ACCESS_KEY");
    let output = nobody.output().expect("xtask runs");
    assert!(
        stderr(&output).contains("there are no AWS credentials here"),
        "{}",
        stderr(&output)
    );
    assert_eq!(account.living(), Vec::<Value>::new());
}

/// What ends an instance when neither our process nor the instance itself does.
#[test]
fn the_accounts_own_sweeper_ends_what_is_past_its_deadline() {
    let account = Account::prepare();
    let definition = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../terraform/modules/validation-instance/sweeper.asl.json"
    );
    let became: Value =
        serde_json::from_str(&account.ask(&["run-sweeper", definition])).expect("JSON");
    let expected = serde_json::json!({
        "passed": "terminated", "ahead": "running", "unreadable": "terminated", "of others": "running"
    });
    assert_eq!(became, expected);
    account.ours();
}

/// The tags are written by the command line and read by the account's policy and sweeper.
#[test]
fn terraform_knows_the_tags_of_the_command_line() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let read = |path: &str| std::fs::read_to_string(root.join(path)).expect(path);
    let terraform = read("terraform/modules/validation-instance/main.tf");
    let command_line = read("packer/tasks/src/validate_ami/aws/tags.rs");
    for tag in [RUN_TAG, "gpu-bringup.dev/terminate-after"] {
        let quoted = format!("\"{tag}\"");
        assert!(
            terraform.contains(&quoted) && command_line.contains(&quoted),
            "{tag}"
        );
    }
}
