//! An API server on loopback: real objects, a record of every request, RBAC, and faults.

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use serde_json::{Value, json};

use crate::device_taint_rules;

/// One request as it was heard.
#[derive(Clone, Debug)]
pub struct Recorded {
    pub method: String,
    pub path: String,
    /// Decoded, in the order of the URL.
    pub query: Vec<(String, String)>,
    pub content_type: String,
    pub authorization: String,
    pub body: Value,
    /// Verb, group and resource with subresource, as RBAC names them.
    pub verb: String,
    pub group: String,
    pub resource: String,
}

impl Recorded {
    fn query(&self, name: &str) -> Option<&str> {
        let found = self.query.iter().find(|(key, _)| key == name);
        found.map(|(_, value)| value.as_str())
    }
}

/// A wrong answer.
#[derive(Clone, Debug)]
pub enum Fault {
    /// A status with a message, and `Retry-After` in seconds.
    Status {
        code: u16,
        message: String,
        retry_after: Option<u32>,
    },
    /// The connection ends before the answer.
    CutBeforeAnswer,
    /// The connection ends in the middle of the answer.
    CutInAnswer,
    /// Nothing comes for a while.
    Slow(Duration),
    /// Something that is not JSON.
    Garbage,
}

/// What becomes of pods that are created.
#[derive(Clone, Debug, Default)]
pub enum Pods {
    /// Each gets the next free GPU, runs and ends at once, and its log are the facts of that GPU.
    #[default]
    Run,
    /// All get the first free GPU.
    RunOnTheSameGpu,
    /// They start and never end.
    RunForEver,
    /// They wait, for this reason.
    Wait(String),
}

#[derive(Default)]
struct State {
    nodes: Vec<Value>,
    runtime_classes: Vec<Value>,
    daemon_sets: Vec<Value>,
    pods: Vec<Value>,
    events: Vec<Value>,
    device_taint_rules: Vec<Value>,
    /// The version of resource.k8s.io that serves them.
    device_taint_rules_at: Option<String>,
    logs: Vec<(String, String)>,
    /// GPUs that pods may get, with the output of `gpu-validator collect` where it sees only this
    /// one.
    free_gpus: VecDeque<String>,
    behaviour: Pods,
    requests: Vec<Recorded>,
    faults: Vec<(String, String, usize, Fault)>,
    /// Rules of a role; without them everything is allowed.
    rules: Option<Value>,
    token: Option<String>,
    version: u64,
    /// Conflicts that another client causes before a PATCH of a node is accepted.
    conflicts: usize,
    /// Objects in a page of a list, and whether the second page's token has expired once.
    page: Option<usize>,
    expire_once: bool,
}

/// The running server; it ends when dropped.
pub struct ApiServer {
    address: String,
    state: Arc<Mutex<State>>,
    ended: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl std::fmt::Debug for ApiServer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.address)
    }
}

impl ApiServer {
    pub fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        let state: Arc<Mutex<State>> = Arc::default();
        let ended = Arc::new(AtomicBool::new(false));
        let thread = std::thread::spawn({
            let (state, ended) = (Arc::clone(&state), Arc::clone(&ended));
            move || {
                for connection in listener.incoming().flatten() {
                    if ended.load(Ordering::SeqCst) {
                        return;
                    }
                    let state = Arc::clone(&state);
                    std::thread::spawn(move || serve(&connection, &state));
                }
            }
        });
        Self {
            address,
            state,
            ended,
            thread: Some(thread),
        }
    }

    /// `http://127.0.0.1:1234`.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// A kubeconfig for this server with a bearer token.
    pub fn kubeconfig(&self, token: &str) -> String {
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "c", "cluster": {"server": self.url()}}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "c", "user": "u"}}],
        })
        .to_string()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Everything but this token is answered with 401.
    pub fn accept_only(&self, token: &str) {
        self.state().token = Some(token.to_owned());
    }

    /// Allows only what the rules of this role allow.
    pub fn enforce(&self, role: &Value) {
        self.state().rules = Some(role["rules"].clone());
    }

    /// A node without a uid gets one, as every object has one.
    pub fn add_node(&self, mut node: Value) {
        let name = node["metadata"]["name"].as_str().unwrap_or_default();
        let uid = json!(format!("uid-of-{name}"));
        if node["metadata"]["uid"].is_null() {
            node["metadata"]["uid"] = uid;
        }
        self.state().nodes.push(node);
    }

    /// The cluster has the kind `DeviceTaintRule` at this version of resource.k8s.io.
    pub fn serve_device_taint_rules(&self, version: &str) {
        self.state().device_taint_rules_at = Some(version.to_owned());
    }

    pub fn device_taint_rules(&self) -> Vec<Value> {
        self.state().device_taint_rules.clone()
    }

    pub fn node(&self, name: &str) -> Value {
        let state = self.state();
        let node = state.nodes.iter().find(|it| it["metadata"]["name"] == name);
        node.cloned().unwrap_or_default()
    }

    pub fn change_node(&self, change: impl FnOnce(&mut Value)) {
        change(&mut self.state().nodes[0]);
    }

    pub fn add_runtime_class(&self, name: &str, handler: &str) {
        let class = json!({"metadata": {"name": name}, "handler": handler});
        self.state().runtime_classes.push(class);
    }

    pub fn add_daemon_set(&self, daemon_set: Value) {
        self.state().daemon_sets.push(daemon_set);
    }

    pub fn add_pod(&self, pod: Value) {
        self.state().pods.push(pod);
    }

    pub fn pods(&self) -> Vec<Value> {
        self.state().pods.clone()
    }

    pub fn add_event(&self, event: Value) {
        self.state().events.push(event);
    }

    pub fn add_log(&self, pod: &str, log: &str) {
        self.state().logs.push((pod.to_owned(), log.to_owned()));
    }

    /// GPUs that pods may get, each with its log.
    pub fn offer_gpus(&self, logs: impl IntoIterator<Item = String>) {
        self.state().free_gpus.extend(logs);
    }

    pub fn let_pods(&self, behaviour: Pods) {
        self.state().behaviour = behaviour;
    }

    /// The next `times` requests with this method whose path begins so are answered wrongly.
    pub fn fail(&self, method: &str, path: &str, times: usize, fault: Fault) {
        let fault = (method.to_owned(), path.to_owned(), times, fault);
        self.state().faults.push(fault);
    }

    /// Every request is answered rightly from now on.
    pub fn heal(&self) {
        self.state().faults.clear();
    }

    /// Another client changes the node before each of the next `times` patches.
    pub fn conflict(&self, times: usize) {
        self.state().conflicts = times;
    }

    /// Lists come in pages of this size; the token of the second page expires once.
    pub fn page(&self, size: usize, expire_once: bool) {
        let mut state = self.state();
        state.page = Some(size);
        state.expire_once = expire_once;
    }

    pub fn requests(&self) -> Vec<Recorded> {
        self.state().requests.clone()
    }
}

impl Drop for ApiServer {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::SeqCst);
        // Wakes the thread that waits for connections.
        let _ = TcpStream::connect(&self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Serves one request and closes, which HTTP/1.1 allows.
fn serve(mut connection: &TcpStream, state: &Mutex<State>) {
    let mut reader = BufReader::new(connection);
    let Some(request) = read_request(&mut reader) else {
        return;
    };
    let fault = {
        let mut state = lock(state);
        state.requests.push(request.clone());
        take_fault(&mut state, &request)
    };
    let cut = matches!(fault, Some(Fault::CutInAnswer));
    let answer = match fault {
        Some(Fault::CutBeforeAnswer) => return,
        Some(Fault::Slow(time)) => {
            std::thread::sleep(time);
            return;
        }
        Some(Fault::Garbage) => Answer::text("<html>a proxy's page</html>"),
        Some(Fault::Status {
            code,
            message,
            retry_after,
        }) => Answer {
            retry_after,
            ..Answer::status(code, &message)
        },
        Some(Fault::CutInAnswer) | None => answer(&mut lock(state), &request),
    };
    let mut bytes = answer.bytes();
    if cut {
        bytes.truncate(bytes.len() - 5);
    }
    // The client may have gone.
    let _ = connection.write_all(&bytes);
    let _ = connection.shutdown(Shutdown::Write);
}

fn take_fault(state: &mut State, request: &Recorded) -> Option<Fault> {
    let fault = state.faults.iter_mut().find(|(method, path, times, _)| {
        *times > 0 && *method == request.method && request.path.starts_with(path.as_str())
    })?;
    fault.2 -= 1;
    Some(fault.3.clone())
}

fn read_request(reader: &mut BufReader<&TcpStream>) -> Option<Recorded> {
    let mut line = String::new();
    reader.read_line(&mut line).ok()?;
    let mut words = line.split_whitespace();
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let (mut length, mut content_type, mut authorization) = (0, String::new(), String::new());
    loop {
        let mut header = String::new();
        reader.read_line(&mut header).ok()?;
        let header = header.trim_end();
        if header.is_empty() {
            break;
        }
        let (name, value) = header.split_once(": ")?;
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().ok()?,
            "content-type" => value.clone_into(&mut content_type),
            "authorization" => value.clone_into(&mut authorization),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    let query: Vec<(String, String)> = query
        .split('&')
        .filter_map(|it| it.split_once('='))
        .map(|(name, value)| (decode(name), decode(value)))
        .collect();
    let (verb, group, resource) = as_rbac_names_it(&method, path);
    Some(Recorded {
        method,
        path: path.to_owned(),
        query,
        content_type,
        authorization,
        body: serde_json::from_slice(&body).unwrap_or_default(),
        verb,
        group,
        resource,
    })
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let decoded = (byte == b'%').then(|| {
            let digits = [rest.next().unwrap_or(b'0'), rest.next().unwrap_or(b'0')];
            u8::from_str_radix(&String::from_utf8_lossy(&digits), 16).unwrap_or(b'?')
        });
        bytes.push(decoded.unwrap_or(byte));
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// The parts of a path: namespace, resource, name, subresource.
fn parts(path: &str) -> (Option<&str>, &str, Option<&str>, Option<&str>) {
    let skip = if path.starts_with("/apis/") { 4 } else { 3 };
    let mut parts: Vec<&str> = path.split('/').skip(skip).collect();
    let namespace = (parts.len() > 2 && parts[0] == "namespaces").then(|| {
        let namespace = parts[1];
        parts.drain(..2);
        namespace
    });
    let part = |index: usize| parts.get(index).copied();
    (namespace, part(0).unwrap_or_default(), part(1), part(2))
}

fn as_rbac_names_it(method: &str, path: &str) -> (String, String, String) {
    let group = path
        .strip_prefix("/apis/")
        .and_then(|it| it.split('/').next());
    let (_, resource, name, subresource) = parts(path);
    let verb = match (method, name) {
        ("GET", None) => "list",
        ("GET", Some(_)) => "get",
        ("POST", _) => "create",
        ("PATCH", _) => "patch",
        ("PUT", _) => "update",
        ("DELETE", None) => "deletecollection",
        ("DELETE", Some(_)) => "delete",
        (_, _) => "?",
    };
    let resource = match subresource {
        Some(subresource) => format!("{resource}/{subresource}"),
        None => resource.to_owned(),
    };
    (
        verb.to_owned(),
        group.unwrap_or_default().to_owned(),
        resource,
    )
}

struct Answer {
    code: u16,
    retry_after: Option<u32>,
    body: String,
}

impl Answer {
    fn object(value: &Value) -> Self {
        Self::text(&value.to_string())
    }

    fn text(text: &str) -> Self {
        Self {
            code: 200,
            retry_after: None,
            body: text.to_owned(),
        }
    }

    /// As the API server words its refusals.
    fn status(code: u16, message: &str) -> Self {
        let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message});
        Self {
            code,
            ..Self::object(&status)
        }
    }

    fn no_such_resource() -> Self {
        Self::status(404, "the server could not find the requested resource")
    }

    fn forbidden(request: &Recorded, verb: &str) -> Self {
        let (resource, group) = (&request.resource, &request.group);
        let message = format!(
            "{resource} is forbidden: User \"test\" cannot {verb} resource \"{resource}\" in API group \"{group}\""
        );
        Self::status(403, &message)
    }

    fn bytes(&self) -> Vec<u8> {
        let retry_after = self
            .retry_after
            .map(|it| format!("Retry-After: {it}\r\n"))
            .unwrap_or_default();
        format!(
            "HTTP/1.1 {} X\r\nContent-Length: {}\r\nConnection: close\r\n{retry_after}\r\n{}",
            self.code,
            self.body.len(),
            self.body
        )
        .into_bytes()
    }
}

fn answer(state: &mut State, request: &Recorded) -> Answer {
    if let Some(token) = &state.token
        && request.authorization != format!("Bearer {token}")
    {
        return Answer::status(401, "Unauthorized");
    }
    let (namespace, resource, name, subresource) = parts(&request.path);
    let version = request.path.split('/').nth(3).unwrap_or_default();
    // Role system:discovery lets every user read the kinds of a version.
    if request.group == "resource.k8s.io" && resource.is_empty() {
        let served = state.device_taint_rules_at.as_deref();
        return match device_taint_rules::discovery(version, served) {
            Some(kinds) => Answer::object(&kinds),
            None => Answer::no_such_resource(),
        };
    }
    if !is_allowed(state, request, &request.verb) {
        return Answer::forbidden(request, &request.verb);
    }
    match (request.verb.as_str(), resource, name, subresource) {
        ("get", "nodes", Some(name), None) => match find(&state.nodes, name) {
            Some(index) => Answer::object(&state.nodes[index]),
            None => not_found("nodes", name),
        },
        ("patch", "nodes", Some(name), _) => match find(&state.nodes, name) {
            Some(index) => patch_node(state, index, request),
            None => not_found("nodes", name),
        },
        ("list", _, None, None) => list(state, namespace, resource, request),
        ("create", "pods", None, None) => create_pod(state, namespace, request),
        ("deletecollection", "pods", None, None) => {
            let selector = request
                .query("labelSelector")
                .unwrap_or_default()
                .to_owned();
            state.pods.retain(|pod| !has_labels(pod, &selector));
            Answer::object(&json!({"kind": "PodList", "items": []}))
        }
        ("get", "pods", Some(name), Some("log")) => {
            match state.logs.iter().find(|(pod, _)| pod == name) {
                Some((_, log)) => Answer::text(log),
                None => not_found("pods", name),
            }
        }
        (verb, "devicetaintrules", Some(name), None)
            if state.device_taint_rules_at.as_deref() == Some(version) =>
        {
            match verb {
                "patch" => apply_device_taint_rule(state, version, name, request),
                "delete" => delete_device_taint_rule(state, name),
                _ => Answer::no_such_resource(),
            }
        }
        _ => Answer::no_such_resource(),
    }
}

/// A server-side apply, which creates what is not there.
fn apply_device_taint_rule(
    state: &mut State,
    version: &str,
    name: &str,
    request: &Recorded,
) -> Answer {
    if request.content_type != "application/apply-patch+yaml" {
        return Answer::status(415, "unsupported media type");
    }
    if request.query("fieldManager").is_none_or(str::is_empty) {
        return Answer::status(400, "fieldManager is required for apply patch");
    }
    let is_there = find(&state.device_taint_rules, name).is_some();
    if !is_there && !is_allowed(state, request, "create") {
        return Answer::forbidden(request, "create");
    }
    if let Some((code, message)) = device_taint_rules::refusal(&request.body, version, name) {
        return Answer::status(code, &message);
    }
    state
        .device_taint_rules
        .retain(|it| it["metadata"]["name"] != name);
    state.device_taint_rules.push(request.body.clone());
    Answer::object(&request.body)
}

fn delete_device_taint_rule(state: &mut State, name: &str) -> Answer {
    match find(&state.device_taint_rules, name) {
        Some(index) => Answer::object(&state.device_taint_rules.remove(index)),
        None => not_found("devicetaintrules.resource.k8s.io", name),
    }
}

fn not_found(resource: &str, name: &str) -> Answer {
    Answer::status(404, &format!("{resource} \"{name}\" not found"))
}

fn find(objects: &[Value], name: &str) -> Option<usize> {
    objects.iter().position(|it| it["metadata"]["name"] == name)
}

fn is_allowed(state: &State, request: &Recorded, verb: &str) -> bool {
    let Some(rules) = state.rules.as_ref().and_then(Value::as_array) else {
        return true;
    };
    let holds = |list: &Value, wanted: &str| {
        list.as_array()
            .is_some_and(|it| it.iter().any(|it| it == wanted))
    };
    rules.iter().any(|rule| {
        holds(&rule["verbs"], verb)
            && holds(&rule["apiGroups"], &request.group)
            && holds(&rule["resources"], &request.resource)
    })
}

/// A merge patch on the object, a strategic merge patch on the conditions of its status.
fn patch_node(state: &mut State, index: usize, request: &Recorded) -> Answer {
    state.version += 1;
    let version = state.version.to_string();
    if state.conflicts > 0 {
        state.conflicts -= 1;
        state.nodes[index]["metadata"]["resourceVersion"] = json!(version);
    }
    let node = &mut state.nodes[index];
    let patch = &request.body;
    let wanted = &patch["metadata"]["resourceVersion"];
    if wanted.is_string() && *wanted != node["metadata"]["resourceVersion"] {
        return Answer::status(
            409,
            "the object has been modified; please apply your changes",
        );
    }
    let of_status = request.resource == "nodes/status";
    let expected = if of_status {
        "application/strategic-merge-patch+json"
    } else {
        "application/merge-patch+json"
    };
    if request.content_type != expected {
        return Answer::status(415, "unsupported media type");
    }
    if of_status {
        let conditions = patch["status"]["conditions"].as_array().cloned();
        for condition in conditions.unwrap_or_default() {
            set_condition(node, condition);
        }
    } else {
        merge(node, patch);
    }
    node["metadata"]["resourceVersion"] = json!(version);
    Answer::object(node)
}

fn set_condition(node: &mut Value, condition: Value) {
    if !node["status"]["conditions"].is_array() {
        node["status"]["conditions"] = json!([]);
    }
    if let Some(conditions) = node["status"]["conditions"].as_array_mut() {
        conditions.retain(|it| it["type"] != condition["type"]);
        conditions.push(condition);
    }
}

/// RFC 7396.
fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        return patch.clone_into(target);
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, change) in changes {
        if change.is_null() {
            if let Some(object) = target.as_object_mut() {
                object.remove(key);
            }
        } else {
            merge(&mut target[key], change);
        }
    }
}

fn list(state: &mut State, namespace: Option<&str>, resource: &str, request: &Recorded) -> Answer {
    let objects = match resource {
        "runtimeclasses" => &state.runtime_classes,
        "daemonsets" => &state.daemon_sets,
        "pods" => &state.pods,
        "events" => &state.events,
        _ => return Answer::no_such_resource(),
    };
    let fields = request.query("fieldSelector").unwrap_or_default();
    let labels = request.query("labelSelector").unwrap_or_default();
    let found: Vec<Value> = objects
        .iter()
        .filter(|it| namespace.is_none_or(|namespace| it["metadata"]["namespace"] == namespace))
        .filter(|it| has_fields(it, fields) && has_labels(it, labels))
        .cloned()
        .collect();
    let size = state.page.unwrap_or(usize::MAX);
    let begin: usize = request
        .query("continue")
        .map_or(0, |it| it.parse().unwrap_or(0));
    if begin > 0 && std::mem::take(&mut state.expire_once) {
        return Answer::status(410, "The provided continue parameter is too old");
    }
    let end = begin.saturating_add(size).min(found.len());
    let next = if end < found.len() {
        end.to_string()
    } else {
        String::new()
    };
    Answer::object(&json!({
        "kind": "List",
        "metadata": {"continue": next},
        "items": found[begin.min(end)..end],
    }))
}

fn has_fields(object: &Value, selector: &str) -> bool {
    let pairs = selector.split(',').filter_map(|it| it.split_once('='));
    pairs.into_iter().all(|(path, wanted)| {
        let pointer = format!("/{}", path.replace('.', "/"));
        object.pointer(&pointer).is_some_and(|it| it == wanted)
    })
}

fn has_labels(object: &Value, selector: &str) -> bool {
    let mut pairs = selector.split(',').filter_map(|it| it.split_once('='));
    pairs.all(|(name, wanted)| object["metadata"]["labels"][name] == wanted)
}

fn create_pod(state: &mut State, namespace: Option<&str>, request: &Recorded) -> Answer {
    let mut pod = request.body.clone();
    let name = pod["metadata"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    if find(&state.pods, &name).is_some() {
        return Answer::status(409, &format!("pods \"{name}\" already exists"));
    }
    pod["metadata"]["namespace"] = json!(namespace);
    pod["status"] = match state.behaviour.clone() {
        Pods::Wait(reason) => json!({"phase": "Pending", "containerStatuses": [
            {"state": {"waiting": {"reason": reason, "message": "it does not come"}}},
        ]}),
        Pods::RunForEver => json!({"phase": "Running"}),
        behaviour => {
            let log = match behaviour {
                Pods::RunOnTheSameGpu => state.free_gpus.front().cloned(),
                _ => state.free_gpus.pop_front(),
            };
            match log {
                Some(log) => {
                    state.logs.push((name, log));
                    json!({"phase": "Succeeded"})
                }
                None => json!({"phase": "Pending", "conditions": [{
                    "type": "PodScheduled",
                    "status": "False",
                    "reason": "Unschedulable",
                    "message": "0/1 nodes are available: 1 Insufficient nvidia.com/gpu.",
                }]}),
            }
        }
    };
    state.pods.push(pod.clone());
    Answer::object(&pod)
}
