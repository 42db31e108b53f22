//! The scripts of manifests/slurm on a real slurmctld and slurmd, whose node is simulated.

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::node::{Node, Scratch, executable};

const NODE: &str = "gpu-node";
/// Two health checks, a state that is saved, a job that is requeued.
const PATIENCE: Duration = Duration::from_mins(1);

/// A cluster of one node, which has the GPUs of the simulated node that was chosen last.
struct Cluster {
    out: Scratch,
    daemons: Vec<Child>,
    /// Kept for their folders.
    nodes: [Node; 2],
}

impl Cluster {
    /// `settings` are lines of slurm.conf, in which `SCRIPTS` is the folder of the scripts.
    fn start(settings: &str) -> Self {
        for program in [
            "munged",
            "slurmctld",
            "slurmd",
            "sinfo",
            "scontrol",
            "sbatch",
        ] {
            assert!(
                program_path(program).is_some(),
                "{program} is missing: apt-get install slurmctld slurmd slurm-client munge"
            );
        }
        let nodes = [
            Node::healthy("h200x8"),
            Node::with_fault("h200x8", "fallen-off-bus"),
        ];
        let mut cluster = Self {
            out: Scratch::new(),
            daemons: Vec::new(),
            nodes,
        };
        let [healthy, sick] = &cluster.nodes;
        for (name, node) in [("healthy", healthy), ("sick", sick)] {
            cluster.script(&format!("validator-{name}"), &on_node(node));
        }
        cluster.choose("healthy");
        cluster.scripts();
        cluster.daemons(settings);
        cluster
    }

    fn path(&self, name: &str) -> PathBuf {
        self.out.path(name)
    }

    fn script(&self, name: &str, text: &str) {
        let path = self.out.write(name, text);
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(path, mode).expect("a script");
    }

    /// slurmd starts each script with an environment of its own, so that the settings of the test
    /// are in a script that starts it.
    fn scripts(&self) {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../manifests/slurm");
        for name in ["health-check.sh", "prolog.sh", "epilog.sh"] {
            let text = format!(
                "#!/bin/sh\nSLURM_CONF={conf} VALIDATOR={chosen} VALIDATOR_SETTINGS=/nonexistent {shipped}/{name} 2>>{log}\n\
                 code=$?\necho $code >>{out}\nexit $code\n",
                conf = self.path("slurm.conf").display(),
                chosen = self.path("chosen").display(),
                shipped = shipped.display(),
                log = self.path("scripts.out").display(),
                out = self.path(&format!("{name}.codes")).display(),
            );
            self.script(&format!("scripts/{name}"), &text);
        }
    }

    fn daemons(&mut self, settings: &str) {
        let folder = self.path("");
        let folder = folder.display().to_string();
        let folder = folder.trim_end_matches('/');
        for name in ["state", "spool", "munge"] {
            std::fs::create_dir_all(self.path(name)).expect("a folder");
        }
        let key = self
            .out
            .write("munge/key", "not a secret: a cluster of one test".repeat(4));
        let mode = std::fs::Permissions::from_mode(0o400);
        std::fs::set_permissions(key, mode).expect("a key");
        let munge = |option: &str, name: &str| format!("--{option}={folder}/munge/{name}");
        self.daemon(
            "munged",
            &[
                "--foreground".to_owned(),
                "--force".to_owned(),
                munge("key-file", "key"),
                munge("socket", "socket"),
                munge("pid-file", "pid"),
                munge("log-file", "log"),
                munge("seed-file", "seed"),
            ],
        );
        let socket = self.path("munge/socket");
        wait("munged's socket", || socket.exists().then_some(()));

        let host = output(Command::new("uname").arg("-n"));
        let host = host.trim().split('.').next().expect("a name").to_owned();
        let user = output(Command::new("id").arg("-un"));
        // Both are bound at once, so that they are two.
        let free = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port"));
        let [controller, node] = free.map(|it| it.local_addr().expect("bound").port());
        let settings = settings.replace("SCRIPTS", &format!("{folder}/scripts"));
        let user = user.trim();
        let conf = format!(
            "ClusterName=test\nSlurmctldHost={host}(127.0.0.1)\nSlurmUser={user}\nSlurmdUser={user}\n\
             AuthType=auth/munge\nAuthInfo=socket={folder}/munge/socket\nCredType=cred/munge\n\
             SlurmctldPort={controller}\nSlurmdPort={node}\n\
             StateSaveLocation={folder}/state\nSlurmdSpoolDir={folder}/spool\n\
             SlurmctldPidFile={folder}/slurmctld.pid\nSlurmdPidFile={folder}/slurmd.pid\n\
             ProctrackType=proctrack/linuxproc\nTaskPlugin=task/none\nMpiDefault=none\n\
             SchedulerType=sched/builtin\nJobAcctGatherType=jobacct_gather/none\nReturnToService=1\n\
             NodeName={NODE} NodeHostname={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN\n\
             PartitionName=all Nodes={NODE} Default=YES State=UP\n{settings}\n"
        );
        self.out.write("slurm.conf", conf);
        self.daemon("slurmctld", &["-D".to_owned()]);
        self.daemon(
            "slurmd",
            &["-D".to_owned(), "-N".to_owned(), NODE.to_owned()],
        );
    }

    fn daemon(&mut self, program: &str, arguments: &[String]) {
        let log = std::fs::File::create(self.path(&format!("{program}.out"))).expect("a log");
        let path = program_path(program).expect("checked before");
        let child = Command::new(path)
            .args(arguments)
            .env("SLURM_CONF", self.path("slurm.conf"))
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("the same file"))
            .stderr(log)
            .spawn();
        self.daemons.push(child.expect("it starts"));
    }

    /// From now on the node has the GPUs of this one.
    fn choose(&self, name: &str) {
        let link = self.path("chosen.new");
        let target = self.path(&format!("validator-{name}"));
        std::os::unix::fs::symlink(target, &link).expect("a link");
        std::fs::rename(link, self.path("chosen")).expect("the link in place of the old one");
    }

    fn client(&self, program: &str, arguments: &[&str]) -> String {
        let mut command = Command::new(program_path(program).expect("checked before"));
        command
            .args(arguments)
            .env("SLURM_CONF", self.path("slurm.conf"))
            .current_dir(self.path(""));
        output(&mut command)
    }

    /// `idle|none`
    fn state(&self) -> String {
        let nodes = format!("--nodes={NODE}");
        let shown = self.client("sinfo", &["--noheader", &nodes, "--format=%T|%E"]);
        shown.trim().to_owned()
    }

    fn wait_for(&self, what: &str, is: impl Fn(&str) -> bool) -> String {
        wait_or(
            what,
            || {
                let state = self.state();
                is(&state).then_some(state)
            },
            || self.seen(),
        )
    }

    /// What explains a state that did not come.
    fn seen(&self) -> String {
        let logs = ["slurmctld.out", "slurmd.out", "scripts.out"];
        let logs = logs.map(|it| std::fs::read_to_string(self.path(it)).unwrap_or_default());
        format!("{}\n{}", self.state(), logs.join("\n"))
    }

    /// Exit codes of a script until now.
    fn codes(&self, script: &str) -> Vec<String> {
        let codes = std::fs::read_to_string(self.path(&format!("{script}.codes")));
        let codes = codes.unwrap_or_default();
        codes.lines().map(str::to_owned).collect()
    }

    /// Waits for two checks that begin from now on.
    fn checks(&self) {
        let before = self.codes("health-check.sh").len();
        wait("two health checks", || {
            // The first one may have begun before.
            (self.codes("health-check.sh").len() >= before + 3).then_some(())
        });
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for daemon in self.daemons.iter_mut().rev() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A script that is the validator on this node, whatever its caller's environment is.
fn on_node(node: &Node) -> String {
    let variables: Vec<String> = node
        .environment()
        .iter()
        .map(|(name, value)| format!("{name}='{value}'"))
        .collect();
    format!(
        "#!/bin/sh\nexec env {} {} \"$@\" --simulated-ok --sysroot {}\n",
        variables.join(" "),
        executable().display(),
        node.sysroot().display()
    )
}

/// Daemons lie where a user's PATH does not reach.
fn program_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var("PATH").unwrap_or_default();
    let folders = path.split(':').chain(["/usr/sbin", "/sbin"]);
    folders
        .map(|it| Path::new(it).join(name))
        .find(|it| it.is_file())
}

fn output(command: &mut Command) -> String {
    let output = command.output().expect("the program starts");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn wait<T>(what: &str, poll: impl FnMut() -> Option<T>) -> T {
    wait_or(what, poll, String::new)
}

fn wait_or<T>(what: &str, mut poll: impl FnMut() -> Option<T>, seen: impl Fn() -> String) -> T {
    let started = Instant::now();
    loop {
        if let Some(value) = poll() {
            return value;
        }
        assert!(
            started.elapsed() < PATIENCE,
            "no {what} within {PATIENCE:?}: {}",
            seen()
        );
        std::thread::sleep(Duration::from_millis(200));
    }
}

#[test]
fn a_sick_node_is_drained_and_resumed_only_by_whoever_drained_it() {
    let cluster = Cluster::start(
        "HealthCheckProgram=SCRIPTS/health-check.sh\nHealthCheckInterval=1\nHealthCheckNodeState=ANY",
    );
    cluster.wait_for("idle node", |it| it.starts_with("idle|"));
    cluster.checks();
    assert_eq!(cluster.state(), "idle|none", "a healthy node is left alone");

    cluster.choose("sick");
    let state = cluster.wait_for("drained node", |it| it.starts_with("drained|"));
    assert!(
        state.starts_with("drained|gpu-validator: SIMULATED FAIL: ") && state.contains("bus"),
        "the reason is the answer of the run: {state}"
    );
    cluster.checks();
    assert_eq!(cluster.state(), state, "the first reason stays");

    cluster.choose("healthy");
    cluster.wait_for("resumed node", |it| it == "idle|none");

    let node = format!("NodeName={NODE}");
    let drain = ["update", &node, "State=DRAIN", "Reason=new fan"];
    cluster.client("scontrol", &drain);
    for gpus in ["healthy", "sick", "healthy"] {
        cluster.choose(gpus);
        cluster.checks();
        assert_eq!(cluster.state(), "drained|new fan", "GPUs are {gpus}");
    }
}

#[test]
fn no_job_begins_on_a_sick_node_and_none_follows_one_that_broke_it() {
    let cluster =
        Cluster::start("Prolog=SCRIPTS/prolog.sh\nEpilog=SCRIPTS/epilog.sh\nPrologFlags=Alloc");
    let submit = |name: &str, script: &str| {
        let output = format!("--output={}", cluster.path(name).display());
        let wrap = format!("--wrap={script}");
        cluster.client("sbatch", &["--parsable", "--requeue", &output, &wrap])
    };
    let ran = |name: &str| {
        let text = std::fs::read_to_string(cluster.path(name)).ok()?;
        text.contains("began").then_some(())
    };
    cluster.wait_for("idle node", |it| it.starts_with("idle|"));
    submit("first", "echo began");
    wait_or("output of a job", || ran("first"), || cluster.seen());
    wait("epilog", || {
        (cluster.codes("epilog.sh") == ["0"]).then_some(())
    });
    assert_eq!(cluster.codes("prolog.sh"), ["0"]);

    // A job in the middle of which the GPU is lost: the epilog drains the node.
    let (begun, end) = (cluster.path("begun"), cluster.path("end"));
    let script = format!(
        "touch {}; while ! [ -e {} ]; do sleep 0.2; done",
        begun.display(),
        end.display()
    );
    submit("second", &script);
    wait_or(
        "a job that runs",
        || begun.exists().then_some(()),
        || cluster.seen(),
    );
    cluster.choose("sick");
    std::fs::write(&end, "").expect("a file");
    let state = cluster.wait_for("drained node", |it| it.starts_with("drained|"));
    assert!(
        state.contains("|gpu-validator: SIMULATED FAIL: "),
        "{state}"
    );

    // Returned to service by hand too early: the prolog drains it again, and the job waits.
    let node = format!("NodeName={NODE}");
    cluster.client("scontrol", &["update", &node, "State=RESUME"]);
    cluster.wait_for("idle node", |it| it.starts_with("idle|"));
    let job = submit("third", "echo began");
    let state = cluster.wait_for("drained node", |it| it.starts_with("drained|"));
    assert!(
        state.contains("|gpu-validator: SIMULATED FAIL: "),
        "{state}"
    );
    assert!(ran("third").is_none(), "the job began");
    let shown = cluster.client(
        "squeue",
        &["--noheader", "--format=%T", "--jobs", job.trim()],
    );
    assert_eq!(shown.trim(), "PENDING");
}
