//! Kubelet and API server as they are when something is wrong, played by the doubles of
//! `tests/cluster`.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use cluster::api_server::{ApiServer, Fault, Pods};
use cluster::kubelet::{Container, Kubelet, KubeletScript, Socket};
use serde_json::{Value, json};

use super::client::{ApiClient, ApiError, PatchKind, Target};
use super::credentials::{Credentials, CredentialsWanted, Secret};
use super::gpu_pods::{self, GpuPodOrder};
use super::kubelet::{self, KubeletQuestion};
use super::requests::{
    GET_NODE, LIST_PODS, LIST_RUNTIME_CLASSES, PATCH_NODE, PATCH_NODE_STATUS, REQUESTS,
};
use crate::interrupt::Interrupt;
use validator_core::facts::{
    CudaDevice, Facts, GpuFacts, GpuPodEnd, GpuPods, KernelRun, KubernetesFacts, Reading, WorkerEnd,
};
use validator_core::profile::KubernetesProfile;

const SHORT: Duration = Duration::from_millis(300);

fn ids() -> Vec<String> {
    vec!["GPU-a".to_owned(), "GPU-b".to_owned()]
}

/// A folder whose path is longer than a unix socket's may be.
fn deep_folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let deep = folder.path().join("x".repeat(100));
    (folder, deep)
}

fn asked(
    root: &Path,
    change: impl FnOnce(&mut KubeletQuestion<'_>),
    interrupt: &Interrupt,
) -> KubernetesFacts {
    let mut facts = KubernetesFacts::default();
    let mut question = KubeletQuestion {
        root,
        deadline: SHORT,
        list_and_watch: false,
        allocatable_within: Duration::ZERO,
        wanted: Some(2),
        interrupt,
    };
    change(&mut question);
    kubelet::ask(&question, &mut facts);
    facts
}

fn ask_script(script: KubeletScript) -> KubernetesFacts {
    let (_folder, root) = deep_folder();
    let _kubelet = Kubelet::start(&root, script);
    asked(&root, |_| {}, &Interrupt::default())
}

fn not_read<T: std::fmt::Debug>(reading: &Reading<T>) -> &str {
    match reading {
        Reading::NotRead(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_kubelet_tells_what_it_has_and_list_and_watch_is_not_asked_by_itself() {
    let (_folder, root) = deep_folder();
    assert_eq!(kubelet::is_present(&root), Reading::Value(false));
    let mut script = KubeletScript::healthy(&ids());
    script.containers.push(Container {
        namespace: "team".to_owned(),
        pod: "train-0".to_owned(),
        container: "train".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        device_ids: vec!["GPU-a".to_owned()],
    });
    script.containers.push(Container {
        resource: "example.com/nic".to_owned(),
        device_ids: vec!["0".to_owned()],
        ..Container::default()
    });
    let kubelet = Kubelet::start(&root, script);
    assert_eq!(kubelet::is_present(&root), Reading::Value(true));
    let facts = asked(&root, |_| {}, &Interrupt::default());
    let allocatable = facts.allocatable.value().expect("read");
    assert_eq!(allocatable["nvidia.com/gpu"], ids());
    assert_eq!(facts.allocatable_wait, None);
    let assignments = facts.assignments.value().expect("read");
    assert_eq!(assignments.len(), 1, "a network card is no GPU");
    assert_eq!(assignments[0].pod, "train-0");
    let plugins = facts.device_plugins.value().expect("read");
    assert_eq!(plugins[0].socket, "nvidia-gpu.sock");
    assert_eq!(plugins[0].answers, Reading::Value(true));
    assert_eq!(plugins[0].devices, Reading::NotSupported);
    assert!(!kubelet.calls().contains(&"ListAndWatch"));
    let facts = asked(&root, |it| it.list_and_watch = true, &Interrupt::default());
    let plugins = facts.device_plugins.value().expect("read");
    let devices = plugins[0].devices.value().expect("read");
    assert_eq!((devices.len(), devices[0].health.as_str()), (2, "Healthy"));
}

#[test]
fn sockets_of_the_kubelet_that_do_not_answer_are_not_read() {
    for (socket, says) in [
        (Socket::Gone, "No such file"),
        (Socket::Stale, "onnection refused"),
        (Socket::Hangs, "no answer within 0.3 s"),
        (Socket::Unimplemented, "unknown method (Unimplemented)"),
    ] {
        let mut script = KubeletScript::healthy(&ids());
        script.pod_resources = socket;
        let start = Instant::now();
        let facts = ask_script(script);
        assert!(start.elapsed() < Duration::from_secs(3), "{socket:?}");
        for reason in [not_read(&facts.allocatable), not_read(&facts.assignments)] {
            assert!(reason.contains(says), "{socket:?}: {reason}");
        }
        let plugins = facts.device_plugins.value().expect("the plugin is well");
        assert_eq!(plugins[0].answers, Reading::Value(true));
    }
}

#[test]
fn a_plugin_that_does_not_answer_was_looked_at() {
    for (socket, says) in [
        (Socket::Stale, "onnection refused"),
        (Socket::Hangs, "no answer within 0.3 s"),
        (Socket::Unimplemented, "unknown method"),
    ] {
        let mut script = KubeletScript::healthy(&ids());
        script.plugin = socket;
        let facts = ask_script(script);
        let plugins = facts.device_plugins.value().expect("the folder was read");
        assert_eq!(plugins[0].answers, Reading::Value(false), "{socket:?}");
        let trouble = plugins[0].trouble.as_deref().expect("a reason");
        assert!(trouble.contains(says), "{socket:?}: {trouble}");
        assert!(facts.allocatable.value().is_some());
    }
    let mut script = KubeletScript::healthy(&ids());
    script.plugin = Socket::Gone;
    let facts = ask_script(script);
    assert_eq!(facts.device_plugins, Reading::Value(Vec::new()));
}

#[test]
fn a_plugin_that_starts_late_is_waited_for() {
    let (_folder, root) = deep_folder();
    let mut script = KubeletScript::healthy(&ids());
    script.allocatable_empty_first = 1;
    let _kubelet = Kubelet::start(&root, script);
    let within = |it: &mut KubeletQuestion<'_>| it.allocatable_within = Duration::from_secs(20);
    let facts = asked(&root, within, &Interrupt::default());
    let wait = facts.allocatable_wait.expect("it was waited for");
    assert_eq!((wait.devices, wait.wanted), (2, 2));
    assert!(wait.waited_s >= 0.5, "{wait:?}");
}

#[test]
fn waiting_for_devices_is_bounded_and_ends_with_the_run() {
    let (_folder, root) = deep_folder();
    let _kubelet = Kubelet::start(&root, KubeletScript::healthy(&ids()[..1]));
    let facts = asked(
        &root,
        |it| it.allocatable_within = Duration::from_millis(50),
        &Interrupt::default(),
    );
    let wait = facts.allocatable_wait.expect("it was waited for");
    assert_eq!((wait.devices, wait.wanted), (1, 2));
    let interrupt = Interrupt::default();
    interrupt.request(15);
    let start = Instant::now();
    asked(
        &root,
        |it| it.allocatable_within = Duration::from_mins(10),
        &interrupt,
    );
    assert!(start.elapsed() < Duration::from_secs(3));
}

fn client_with(server: &ApiServer, token: &str) -> ApiClient {
    let credentials = Credentials {
        server: server.url(),
        token: Some(Secret::new(token)),
        ..Credentials::default()
    };
    ApiClient::new(&credentials, SHORT, &Interrupt::default()).expect("a client")
}

fn server_with_node() -> (ApiServer, ApiClient) {
    let server = ApiServer::start();
    server.add_node(json!({"metadata": {"name": "n", "resourceVersion": "1"}}));
    let client = client_with(&server, "secret-token");
    (server, client)
}

fn get_node(client: &ApiClient) -> Result<Value, ApiError> {
    client.get(Target::object(GET_NODE, "n"))
}

fn status(code: u16, message: &str, retry_after: Option<u32>) -> Fault {
    Fault::Status {
        code,
        message: message.to_owned(),
        retry_after,
    }
}

#[test]
fn refusals_are_told_in_plain_words() {
    for (code, message, says) in [
        (401, "Unauthorized", "does not accept the credentials (401)"),
        (
            403,
            "nodes is forbidden",
            "RBAC grants this user no verb `get` on resource `nodes`: nodes is forbidden; `gpu-validator kubernetes rbac`",
        ),
        (
            404,
            "nodes \"n\" not found",
            "there is no such object (404): nodes \"n\" not found",
        ),
        (
            409,
            "modified",
            "the object was changed or exists already (409): modified",
        ),
        (302, "", "the API server returned 302"),
    ] {
        let (server, client) = server_with_node();
        server.fail("GET", "/api/v1/nodes/n", 9, status(code, message, None));
        let error = get_node(&client).expect_err("it is refused");
        assert_eq!(error.status, Some(code));
        assert!(error.text.starts_with("get nodes n: "), "{error}");
        assert!(error.text.contains(says), "{error}");
        assert_eq!(server.requests().len(), 1, "{code} does not pass by itself");
    }
}

#[test]
fn a_get_is_asked_again_while_that_may_help() {
    for fault in [
        status(500, "etcd", None),
        status(429, "too many", None),
        status(503, "", Some(0)),
        Fault::CutBeforeAnswer,
        Fault::CutInAnswer,
    ] {
        let (server, client) = server_with_node();
        server.fail("GET", "/api/v1/nodes/n", 2, fault.clone());
        let node = get_node(&client).unwrap_or_else(|error| panic!("{fault:?}: {error}"));
        assert_eq!(node["metadata"]["name"], "n");
        assert_eq!(server.requests().len(), 3, "{fault:?}");
    }
}

#[test]
fn asking_again_is_bounded_and_retry_after_is_honoured() {
    let (server, client) = server_with_node();
    server.fail("GET", "/", 99, status(503, "down", Some(0)));
    let error = get_node(&client).expect_err("it stays down");
    assert!(
        error.text.contains("failed (503): down (4 attempts)"),
        "{error}"
    );
    assert_eq!(server.requests().len(), 4);

    let (server, client) = server_with_node();
    server.fail("GET", "/", 1, status(429, "later", Some(1)));
    let start = Instant::now();
    get_node(&client).expect("later it answers");
    assert!(
        start.elapsed() >= Duration::from_secs(1),
        "it waited as long as it was told"
    );

    let (server, client) = server_with_node();
    server.fail("GET", "/", 9, status(429, "much later", Some(3600)));
    let start = Instant::now();
    assert_eq!(
        get_node(&client).expect_err("an hour is too long").status,
        Some(429)
    );
    assert!(start.elapsed() < Duration::from_secs(1));
    assert_eq!(server.requests().len(), 1);
}

#[test]
fn slow_answers_and_those_that_are_none_are_errors() {
    let (server, client) = server_with_node();
    server.fail("GET", "/", 9, Fault::Slow(Duration::from_millis(600)));
    let error = get_node(&client).expect_err("too slow");
    assert!(error.text.contains("did not answer in time"), "{error}");

    let (server, client) = server_with_node();
    server.fail("GET", "/", 9, Fault::Garbage);
    let error = get_node(&client).expect_err("not JSON");
    assert!(error.text.contains("the answer is not JSON"), "{error}");

    let (server, client) = server_with_node();
    drop(server);
    let error = get_node(&client).expect_err("nobody is there");
    assert!(error.text.contains("cannot be reached"), "{error}");
}

#[test]
fn a_change_is_never_asked_for_twice() {
    for fault in [
        status(503, "down", None),
        status(429, "later", Some(0)),
        Fault::CutBeforeAnswer,
        Fault::CutInAnswer,
    ] {
        let (server, client) = server_with_node();
        server.fail("PATCH", "/", 9, fault.clone());
        let target = Target::object(PATCH_NODE, "n");
        let patched = client.patch(target, PatchKind::Merge, &json!({}));
        assert!(patched.is_err(), "{fault:?}");
        assert_eq!(server.requests().len(), 1, "{fault:?}");
    }
}

#[test]
fn a_run_that_is_stopped_does_not_wait_for_the_server() {
    let server = ApiServer::start();
    server.fail("GET", "/", 9, status(429, "later", Some(9)));
    let interrupt = Interrupt::default();
    let credentials = Credentials {
        server: server.url(),
        ..Credentials::default()
    };
    let client = ApiClient::new(&credentials, SHORT, &interrupt).expect("a client");
    interrupt.request(2);
    let start = Instant::now();
    assert!(get_node(&client).is_err());
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn lists_are_read_page_by_page_and_once_more_when_a_page_expires() {
    let target = Target::everywhere(LIST_RUNTIME_CLASSES);
    for expire_once in [false, true] {
        let (server, client) = server_with_node();
        for name in ["a", "b", "c"] {
            server.add_runtime_class(name, "h");
        }
        server.page(2, expire_once);
        let classes = client.list(target, &[]).expect("a list");
        assert_eq!(classes.len(), 3);
    }
    let (server, client) = server_with_node();
    server.fail(
        "GET",
        "/apis/node.k8s.io/v1/",
        9,
        status(410, "expired", None),
    );
    let error = client.list(target, &[]).expect_err("it expires for ever");
    assert_eq!(error.status, Some(410));
    assert_eq!(server.requests().len(), 2);
}

#[test]
fn the_rules_of_each_role_allow_its_requests_and_the_missing_verb_is_named() {
    let (server, client) = server_with_node();
    let role = super::role_yaml(super::Purpose::Gate, "r", None);
    server.enforce(&serde_yaml::from_str(&role).expect("YAML"));
    get_node(&client).expect("allowed");
    let target = Target::object(PATCH_NODE_STATUS, "n");
    let patch = json!({"status": {"conditions": []}});
    client
        .patch(target, PatchKind::StrategicMerge, &patch)
        .expect("allowed");
    let error = client
        .list(Target::in_namespace(LIST_PODS, "x"), &[])
        .expect_err("the gate lists no pods");
    assert!(
        error.text.contains("no verb `list` on resource `pods`"),
        "{error}"
    );
    for (_, requests) in REQUESTS {
        for request in *requests {
            assert!(!request.verb.is_empty() && !request.resource.is_empty());
        }
    }
}

fn wanted(folder: &Path, kubeconfig: &Value) -> CredentialsWanted {
    let path = folder.join("kubeconfig");
    std::fs::write(&path, kubeconfig.to_string()).expect("written");
    CredentialsWanted {
        kubeconfig: vec![path],
        ..CredentialsWanted::default()
    }
}

fn kubeconfig(cluster: &Value, user: &Value) -> Value {
    json!({
        "current-context": "one",
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
        "preferences": {},
    })
}

fn found(cluster: &Value, user: &Value) -> Result<Credentials, String> {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("token"), "from-file\n").expect("written");
    std::fs::write(folder.path().join("ca.crt"), "PEM").expect("written");
    let wanted = wanted(folder.path(), &kubeconfig(cluster, user));
    wanted
        .find(&Interrupt::default())
        .map(|it| it.expect("there are some"))
}

#[test]
fn a_kubeconfig_gives_tokens_and_certificates() {
    let https = json!({"server": "https://c", "certificate-authority-data": "UEVN"});
    let inline = found(&https, &json!({"token": "t"})).expect("credentials");
    assert_eq!(inline.certificate_authority.as_deref(), Some(&b"PEM"[..]));
    assert_eq!(inline.token, Some(Secret::new("t")));
    let files = json!({"server": "https://c", "certificate-authority": "ca.crt"});
    let from_files = found(&files, &json!({"tokenFile": "token"})).expect("credentials");
    assert_eq!(
        from_files.certificate_authority,
        inline.certificate_authority
    );
    assert_eq!(from_files.token, Some(Secret::new("from-file\n")));
    let certificate = json!({"client-certificate-data": "UEVN", "client-key": "ca.crt"});
    let identity = found(&https, &certificate).expect("credentials");
    assert_eq!(identity.client_identity, Some(Secret::new("PEM\nPEM")));
    assert!(
        !format!("{inline:?}").contains("\"t\""),
        "a token is not shown"
    );
}

#[test]
fn an_exec_plugin_is_run_and_told_of_its_caller() {
    let https = json!({"server": "https://c", "certificate-authority-data": "UEVN"});
    let exec = |script: &str| {
        json!({"exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": "sh",
            "args": ["-c", script],
            "env": [{"name": "GREETING", "value": "hello"}],
            "installHint": "install it",
            "provideClusterInfo": true,
        }})
    };
    let answers = r#"case "$KUBERNETES_EXEC_INFO" in *https://c*) ;; *) exit 9;; esac
        echo "{\"status\": {\"token\": \"$GREETING\"}}""#;
    let credentials = found(&https, &exec(answers)).expect("credentials");
    assert_eq!(credentials.token, Some(Secret::new("hello")));
    for (script, says) in [
        (
            "echo no rights >&2; exit 3",
            "ended with status 3: no rights (install it)",
        ),
        ("echo secret-token", "did not answer with an ExecCredential"),
        ("echo '{}'", "neither a token nor a client certificate"),
    ] {
        let error = found(&https, &exec(script)).expect_err(script);
        assert!(error.contains(says), "{error}");
        assert!(!error.contains("secret-token"), "{error}");
    }
    let missing = json!({"exec": {"command": "no-such-plugin"}});
    let error = found(&https, &missing).expect_err("it is missing");
    assert!(
        error.contains("exec plugin no-such-plugin cannot be started"),
        "{error}"
    );
}

#[test]
fn what_is_unsafe_or_wrong_in_a_kubeconfig_is_refused() {
    let token = json!({"token": "t"});
    let https = json!({"server": "https://c"});
    for (cluster, user, says) in [
        (
            json!({"server": "http://c"}),
            &token,
            "has no TLS, which is refused",
        ),
        (
            json!({"server": "https://c", "insecure-skip-tls-verify": true}),
            &token,
            "insecure-skip-tls-verify is true, which is refused",
        ),
        (json!({"server": "c:6443"}), &token, "begins with https://"),
        (
            json!({"server": "https://c", "certificate-authority-data": "%"}),
            &token,
            "certificate-authority-data is not base64",
        ),
        (
            json!({"server": "https://c", "certificate-authority": "none.crt"}),
            &token,
            "cannot read",
        ),
        (
            https.clone(),
            &json!({"auth-provider": {"name": "gcp"}}),
            "auth-provider",
        ),
        (
            https.clone(),
            &json!({"client-key-data": "UEVN"}),
            "belong together",
        ),
    ] {
        let error = found(&cluster, user).expect_err(says);
        assert!(error.contains(says), "{error}");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let mut other = wanted(folder.path(), &kubeconfig(&https, &token));
    other.context = Some("two".to_owned());
    let error = other
        .find(&Interrupt::default())
        .expect_err("no such context");
    assert!(error.contains("has no context `two`"), "{error}");
    other.kubeconfig = vec![folder.path().join("none")];
    assert!(other.find(&Interrupt::default()).is_err());
}

#[test]
fn a_pod_is_its_service_account_and_a_machine_is_nobody() {
    let folder = tempfile::tempdir().expect("a folder");
    let mut pod = CredentialsWanted {
        service: Some(("fd00::1".to_owned(), "443".to_owned())),
        service_account: folder.path().to_owned(),
        ..CredentialsWanted::default()
    };
    assert_eq!(
        pod.find(&Interrupt::default()),
        Ok(None),
        "no token is mounted"
    );
    std::fs::write(folder.path().join("token"), "t").expect("written");
    assert!(
        pod.find(&Interrupt::default()).is_err(),
        "half a service account"
    );
    std::fs::write(folder.path().join("ca.crt"), "PEM").expect("written");
    let credentials = pod
        .find(&Interrupt::default())
        .expect("read")
        .expect("there");
    assert_eq!(credentials.server, "https://[fd00::1]:443");
    assert_eq!(credentials.token, Some(Secret::new("t")));
    pod.service = None;
    assert_eq!(pod.find(&Interrupt::default()), Ok(None));
}

/// The output of `gpu-validator collect` in a pod with this GPU.
fn log_of(uuid: &str) -> String {
    let run = KernelRun {
        end: WorkerEnd::Finished,
        values_compared: 1,
        mismatches: 0,
        examples: Vec::new(),
        wall_ms: 1.0,
    };
    let gpu = GpuFacts {
        uuid: Reading::Value(uuid.to_owned()),
        ..GpuFacts::default()
    };
    let mut facts = Facts {
        gpus: vec![gpu],
        ..Facts::default()
    };
    facts.cuda.devices = Reading::Value(vec![CudaDevice {
        uuid: uuid.to_owned(),
        ..CudaDevice::default()
    }]);
    facts
        .load
        .cuda_kernel
        .insert(uuid.to_owned(), Reading::Value(run));
    serde_json::to_string_pretty(&facts).expect("facts are JSON")
}

fn order(count: u32) -> GpuPodOrder {
    GpuPodOrder {
        node: "n".to_owned(),
        namespace: "gpu-bringup".to_owned(),
        image: "image".to_owned(),
        resource: "nvidia.com/gpu".to_owned(),
        runtime_class: Some("nvidia".to_owned()),
        count,
        free: Some(count),
        deadline: Duration::from_millis(200),
    }
}

fn run_pods(server: &ApiServer, count: u32, interrupt: &Interrupt) -> Result<GpuPods, String> {
    let credentials = Credentials {
        server: server.url(),
        ..Credentials::default()
    };
    let client = || ApiClient::new(&credentials, SHORT, interrupt).expect("a client");
    gpu_pods::run(&client(), &client(), &order(count), interrupt)
}

#[test]
fn pods_at_once_report_their_gpus_and_are_removed() {
    let server = ApiServer::start();
    let role = super::role_yaml(super::Purpose::GpuPod, "r", Some("gpu-bringup"));
    server.enforce(&serde_yaml::from_str(&role).expect("YAML"));
    server.offer_gpus([log_of("GPU-a"), log_of("GPU-b")]);
    let seen = run_pods(&server, 2, &Interrupt::default()).expect("they ran");
    assert_eq!(seen.leftovers_removed, 0);
    assert_eq!(seen.cleanup_trouble, None);
    let uuids: Vec<_> = seen.pods.iter().map(|it| it.cuda_uuids.clone()).collect();
    assert_eq!(uuids, [["GPU-a"], ["GPU-b"]]);
    assert!(seen.pods.iter().all(|it| it.end == GpuPodEnd::Finished));
    assert!(server.pods().is_empty(), "they are removed");
}

#[test]
fn the_same_gpu_in_two_pods_is_seen() {
    let server = ApiServer::start();
    server.let_pods(Pods::RunOnTheSameGpu);
    server.offer_gpus([log_of("GPU-a")]);
    let seen = run_pods(&server, 2, &Interrupt::default()).expect("they ran");
    assert_eq!(seen.pods[0].cuda_uuids, seen.pods[1].cuda_uuids);
}

#[test]
fn pods_that_do_not_get_there_are_told_apart_and_removed() {
    for (behaviour, end) in [
        (
            Pods::Wait("ImagePullBackOff".to_owned()),
            GpuPodEnd::NotStarted("ImagePullBackOff: it does not come".to_owned()),
        ),
        (
            Pods::RunForEver,
            GpuPodEnd::Failed("it ran until time was up".to_owned()),
        ),
        // No GPU is offered.
        (
            Pods::Run,
            GpuPodEnd::Busy(
                "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu.".to_owned(),
            ),
        ),
    ] {
        let server = ApiServer::start();
        server.let_pods(behaviour);
        let seen = run_pods(&server, 1, &Interrupt::default()).expect("it was followed");
        assert_eq!(seen.pods[0].end, end);
        assert!(server.pods().is_empty(), "it is removed");
    }
}

#[test]
fn leftovers_of_this_node_go_first_and_nobody_elses() {
    let server = ApiServer::start();
    server.offer_gpus([log_of("GPU-a")]);
    let pod = |name: &str, node: &str| {
        json!({"metadata": {"name": name, "namespace": "gpu-bringup", "labels": {
            "app.kubernetes.io/name": "gpu-validator-gpu-pod",
            "gpu-bringup.dev/node": node,
        }}})
    };
    server.add_pod(pod("left", "n"));
    server.add_pod(pod("other", "m"));
    let seen = run_pods(&server, 1, &Interrupt::default()).expect("it ran");
    assert_eq!(seen.leftovers_removed, 1);
    let left = server.pods();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0]["metadata"]["name"], "other");
}

#[test]
fn a_run_that_is_stopped_removes_its_pods_at_once() {
    let server = ApiServer::start();
    server.let_pods(Pods::RunForEver);
    let interrupt = Interrupt::default();
    interrupt.request(2);
    let start = Instant::now();
    let error = run_pods(&server, 2, &interrupt).expect_err("nothing was seen");
    assert_eq!(error, "the pods were removed early: signal 2 (SIGINT)");
    let created = server.requests();
    assert_eq!(created.iter().filter(|it| it.verb == "create").count(), 2);
    assert!(server.pods().is_empty(), "they are removed");
    assert!(start.elapsed() < Duration::from_secs(2));
}

#[test]
fn an_answer_that_was_lost_leaves_no_pod_behind() {
    let server = ApiServer::start();
    server.fail(
        "POST",
        "/api/v1/namespaces/gpu-bringup/pods",
        1,
        Fault::CutInAnswer,
    );
    let error = run_pods(&server, 2, &Interrupt::default()).expect_err("an answer was lost");
    assert!(
        error.contains("create pods in namespace gpu-bringup"),
        "{error}"
    );
    assert!(
        server.pods().is_empty(),
        "the pod whose answer was lost is removed"
    );
}

#[test]
fn pods_that_cannot_be_removed_are_told() {
    let server = ApiServer::start();
    server.offer_gpus([log_of("GPU-a")]);
    server.fail("DELETE", "/", 9, status(500, "down", None));
    let seen = run_pods(&server, 1, &Interrupt::default()).expect("it ran");
    let trouble = seen.cleanup_trouble.expect("it is told");
    assert!(trouble.contains("were not removed"), "{trouble}");
    server.fail("DELETE", "/", 0, Fault::Garbage);
    assert_eq!(server.pods().len(), 1);
}

#[test]
fn the_cluster_is_read_with_the_rights_of_its_role() {
    let server = ApiServer::start();
    let rules = |purpose| -> Vec<Value> {
        let role = super::role_yaml(purpose, "r", None);
        let role: Value = serde_yaml::from_str(&role).expect("YAML");
        role["rules"].as_array().expect("rules").clone()
    };
    let of_both = [
        rules(super::Purpose::Checks),
        rules(super::Purpose::DevicePlugin),
    ];
    server.enforce(&json!({"rules": of_both.concat()}));
    server.add_runtime_class("nvidia", "nvidia");
    server.add_node(json!({
        "metadata": {"name": "n", "labels": {"nvidia.com/gpu": "true", "role": "gpu", "team": "a", "secret": "x"}},
        "spec": {"taints": [{"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"}]},
        "status": {
            "conditions": [{"type": "Ready", "status": "True"}],
            "capacity": {"cpu": "8", "nvidia.com/gpu": "8", "memory": "1Ki"},
            "allocatable": {"nvidia.com/gpu": "7"},
        },
    }));
    server.add_daemon_set(json!({
        "metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system", "uid": "d"},
        "spec": {"template": {"spec": {
            "nodeSelector": {"role": "gpu"},
            "containers": [{"image": "nvcr.io/nvidia/k8s-device-plugin:v0.18.0"}],
        }}},
        "status": {"desiredNumberScheduled": 2, "numberReady": 1},
    }));
    server.add_daemon_set(
        json!({"metadata": {"name": "nvidia-device-plugin-gpu-feature-discovery"}}),
    );
    let pod = |name: &str, owner: &str| {
        json!({
            "metadata": {"name": name, "namespace": "kube-system", "ownerReferences": [{"uid": owner}]},
            "spec": {"nodeName": "n"},
            "status": {"phase": "Running", "containerStatuses": [{
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
            }]},
        })
    };
    server.add_pod(pod("plugin-1", "d"));
    server.add_pod(pod("other-1", "e"));
    server.add_log("plugin-1", "first\ncould not load NVML library\n");
    server.add_event(json!({
        "metadata": {"namespace": "kube-system"},
        "involvedObject": {"kind": "Pod", "name": "plugin-1"},
        "reason": "BackOff",
        "message": "restarting failed container",
    }));
    let client = client_with(&server, "t");
    let mut profile = KubernetesProfile::default();
    profile.labels.insert("team".to_owned(), "a".to_owned());
    let facts = super::cluster::ask(&client, "https://c", Ok("n".to_owned()), &profile);
    let node = facts.node.value().expect("a node");
    let labels: Vec<&str> = node.labels.keys().map(String::as_str).collect();
    assert_eq!(
        labels,
        ["nvidia.com/gpu", "role", "team"],
        "others are not kept"
    );
    assert_eq!(node.capacity["nvidia.com/gpu"], 8);
    assert_eq!(node.allocatable["nvidia.com/gpu"], 7);
    assert_eq!(node.taints[0].to_string(), "nvidia.com/gpu=true:NoSchedule");
    let listed: Vec<String> = server
        .requests()
        .iter()
        .filter(|it| it.verb == "list" && it.path.contains("/pods"))
        .map(|it| it.path.clone())
        .collect();
    assert_eq!(listed, ["/api/v1/namespaces/kube-system/pods"]);
    let classes = facts.runtime_classes.value().expect("classes");
    assert_eq!(classes["nvidia"], "nvidia");
    let sets = facts.device_plugin_daemon_sets.value().expect("sets");
    assert_eq!(sets.len(), 1);
    assert_eq!(
        (sets[0].desired, sets[0].ready, sets[0].pods.len()),
        (2, 1, 1)
    );
    let pod = &sets[0].pods[0];
    assert_eq!(pod.waiting, ["CrashLoopBackOff: back-off"]);
    let log = pod.log_tail.value().expect("a log");
    assert_eq!(log[1], "could not load NVML library");
    let events = pod.events.value().expect("events");
    assert_eq!(events, &["BackOff: restarting failed container"]);

    server.enforce(&json!({"rules": []}));
    let facts = super::cluster::ask(&client, "https://c", Ok("n".to_owned()), &profile);
    for reason in [
        not_read(&facts.node),
        not_read(&facts.runtime_classes),
        not_read(&facts.device_plugin_daemon_sets),
    ] {
        assert!(reason.contains("403"), "{reason}");
    }
    let unnamed = super::cluster::ask(&client, "https://c", Err("no name".to_owned()), &profile);
    assert_eq!(unnamed.node, Reading::NotRead("no name".to_owned()));
}
