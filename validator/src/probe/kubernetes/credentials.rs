//! Who this is to the API server: a pod's service account, or a user of a kubeconfig.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::interrupt::Interrupt;
use crate::probe::json::at;
use crate::worker::listener::{ConversationEnd, read_output};
use crate::worker::process::{ProcessEnd, WorkerProcess};

/// Where Kubernetes mounts a pod's service account.
///
/// Source: Kubernetes documentation, Accessing the Kubernetes API from a Pod.
const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";
/// How long `aws eks get-token` and its like may take.
const EXEC_DEADLINE: Duration = Duration::from_secs(30);

/// A token or a private key: it shows itself nowhere by accident.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Secret(String);

impl Secret {
    pub(crate) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Secret")
    }
}

/// What it takes to speak to one API server as one user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Credentials {
    /// `https://10.0.0.1:443`.
    pub(crate) server: String,
    /// Certificates in PEM; without them the system's are trusted.
    pub(crate) certificate_authority: Option<Vec<u8>>,
    pub(crate) insecure_skip_tls_verify: bool,
    pub(crate) token: Option<Secret>,
    /// Private key and certificate in PEM.
    pub(crate) client_identity: Option<Secret>,
    pub(crate) proxy: Option<String>,
}

/// Which credentials are wanted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CredentialsWanted {
    /// Kubeconfig files; where there are several, the first that names something wins, as with
    /// kubectl.
    pub(crate) kubeconfig: Vec<PathBuf>,
    pub(crate) context: Option<String>,
    /// A kubeconfig may switch off the verification of the server's certificate.
    pub(crate) allow_insecure: bool,
    /// `KUBERNETES_SERVICE_HOST` and `KUBERNETES_SERVICE_PORT`, in a pod.
    pub(crate) service: Option<(String, String)>,
    /// Where a pod's service account lies.
    pub(crate) service_account: PathBuf,
}

impl CredentialsWanted {
    /// A kubeconfig where one is named, here or by `KUBECONFIG`, else the pod's service account.
    pub(crate) fn from_environment(
        kubeconfig: Option<&Path>,
        context: Option<&str>,
        allow_insecure: bool,
    ) -> Self {
        let variable = |name: &str| std::env::var(name).ok().filter(|it| !it.is_empty());
        let kubeconfig = match kubeconfig {
            Some(path) => vec![path.to_owned()],
            None => std::env::var_os("KUBECONFIG")
                .map(|paths| {
                    std::env::split_paths(&paths)
                        .filter(|it| !it.as_os_str().is_empty())
                        .collect()
                })
                .unwrap_or_default(),
        };
        Self {
            kubeconfig,
            context: context.map(str::to_owned),
            allow_insecure,
            service: variable("KUBERNETES_SERVICE_HOST").zip(variable("KUBERNETES_SERVICE_PORT")),
            service_account: PathBuf::from(SERVICE_ACCOUNT),
        }
    }

    /// The credentials; `None` where there are none to be found.
    pub(crate) fn find(&self, interrupt: &Interrupt) -> Result<Option<Credentials>, String> {
        if !self.kubeconfig.is_empty() {
            return from_kubeconfig(self, interrupt).map(Some);
        }
        match &self.service {
            Some((host, port)) if self.service_account.join("token").exists() => {
                from_service_account(&self.service_account, host, port).map(Some)
            }
            _ => Ok(None),
        }
    }
}

fn from_service_account(folder: &Path, host: &str, port: &str) -> Result<Credentials, String> {
    let token = read_text(&folder.join("token"))?;
    let authority = read_text(&folder.join("ca.crt"))?;
    let host = if host.contains(':') {
        format!("[{host}]")
    } else {
        host.to_owned()
    };
    Ok(Credentials {
        server: format!("https://{host}:{port}"),
        certificate_authority: Some(authority.into_bytes()),
        token: Some(Secret(token)),
        ..Credentials::default()
    })
}

fn read_text(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path)
        .map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// A kubeconfig. Kubernetes adds fields, so unknown ones are left alone.
///
/// Source: Kubernetes reference, kubeconfig (v1).
#[derive(Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Kubeconfig {
    current_context: String,
    clusters: Vec<Named<NamedCluster>>,
    users: Vec<Named<NamedUser>>,
    contexts: Vec<Named<NamedContext>>,
}

#[derive(Debug, Deserialize)]
struct Named<T> {
    name: String,
    #[serde(flatten)]
    value: T,
}

#[derive(Debug, Deserialize)]
struct NamedCluster {
    cluster: Cluster,
}

#[derive(Debug, Deserialize)]
struct NamedUser {
    #[serde(default)]
    user: User,
}

#[derive(Debug, Deserialize)]
struct NamedContext {
    context: Context,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "kebab-case")]
struct Cluster {
    server: String,
    certificate_authority: Option<PathBuf>,
    certificate_authority_data: Option<String>,
    insecure_skip_tls_verify: bool,
    tls_server_name: Option<String>,
    proxy_url: Option<String>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Context {
    cluster: String,
    user: String,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct User {
    token: Option<String>,
    #[serde(rename = "tokenFile")]
    token_file: Option<PathBuf>,
    #[serde(rename = "client-certificate")]
    client_certificate: Option<PathBuf>,
    #[serde(rename = "client-certificate-data")]
    client_certificate_data: Option<String>,
    #[serde(rename = "client-key")]
    client_key: Option<PathBuf>,
    #[serde(rename = "client-key-data")]
    client_key_data: Option<String>,
    exec: Option<Exec>,
    #[serde(rename = "auth-provider")]
    auth_provider: Option<Value>,
    username: Option<String>,
}

impl std::fmt::Debug for User {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("User")
    }
}

#[derive(Clone, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
struct Exec {
    api_version: String,
    command: String,
    args: Option<Vec<String>>,
    env: Option<Vec<ExecVariable>>,
    install_hint: Option<String>,
    provide_cluster_info: bool,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
struct ExecVariable {
    name: String,
    value: String,
}

fn from_kubeconfig(
    wanted: &CredentialsWanted,
    interrupt: &Interrupt,
) -> Result<Credentials, String> {
    let mut files = Vec::new();
    for path in &wanted.kubeconfig {
        let text = read_text(path)?;
        let config: Kubeconfig = serde_yaml::from_str(&text)
            .map_err(|error| format!("{} is no kubeconfig: {error}", path.display()))?;
        files.push((path.as_path(), config));
    }
    let ((cluster_path, cluster), (user_path, user)) = chosen(&files, wanted.context.as_deref())?;
    let mut credentials = of_cluster(cluster_path, cluster, wanted.allow_insecure)?;
    add_user(&mut credentials, user_path, user, cluster, interrupt)?;
    Ok(credentials)
}

type Files<'a> = Vec<(&'a Path, Kubeconfig)>;

/// Cluster and user of the context, each with its file.
type Chosen<'a> = ((&'a Path, &'a Cluster), (&'a Path, &'a User));

fn chosen<'a>(files: &'a Files<'a>, context: Option<&str>) -> Result<Chosen<'a>, String> {
    let names = || {
        let names = files.iter().map(|(path, _)| path.display().to_string());
        names.collect::<Vec<_>>().join(", ")
    };
    let current = || {
        let mut current = files.iter().map(|(_, it)| it.current_context.as_str());
        current.find(|it| !it.is_empty())
    };
    let context_name = context
        .or_else(current)
        .ok_or_else(|| format!("{} names no current-context", names()))?;
    let (_, context) = find(files, |it| &it.contexts, context_name)
        .ok_or_else(|| format!("{} has no context `{context_name}`", names()))?;
    let context = &context.context;
    let (cluster_path, cluster) = find(files, |it| &it.clusters, &context.cluster)
        .ok_or_else(|| format!("{} has no cluster `{}`", names(), context.cluster))?;
    let (user_path, user) = find(files, |it| &it.users, &context.user)
        .ok_or_else(|| format!("{} has no user `{}`", names(), context.user))?;
    Ok(((cluster_path, &cluster.cluster), (user_path, &user.user)))
}

/// A kubeconfig, as [`crate::fuzzing`] makes it: no file that it names is read, and no program
/// started.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(text: &str) {
    let Ok(config) = serde_yaml::from_str::<Kubeconfig>(text) else {
        return;
    };
    let files = vec![(Path::new("kubeconfig"), config)];
    let Ok(((path, cluster), (_, user))) = chosen(&files, None) else {
        return;
    };
    if let Some(exec) = &user.exec {
        let _ = exec_info(exec, cluster);
    }
    if cluster.certificate_authority.is_none() {
        let refused = of_cluster(path, cluster, false);
        let insecure = cluster.insecure_skip_tls_verify || cluster.server.starts_with("http:");
        assert!(!insecure || refused.is_err(), "{}", cluster.server);
    }
}

fn find<'a, T>(
    files: &'a Files<'a>,
    list: impl Fn(&'a Kubeconfig) -> &'a Vec<Named<T>>,
    name: &str,
) -> Option<(&'a Path, &'a T)> {
    files.iter().find_map(|(path, config)| {
        let named = list(config).iter().find(|it| it.name == name)?;
        Some((*path, &named.value))
    })
}

fn of_cluster(path: &Path, cluster: &Cluster, allow_insecure: bool) -> Result<Credentials, String> {
    if !cluster.server.starts_with("https://") && !cluster.server.starts_with("http://") {
        return Err(format!(
            "{}: the cluster's server is `{}`, expected an address that begins with https://",
            path.display(),
            cluster.server
        ));
    }
    let plain = cluster.server.starts_with("http://");
    if (cluster.insecure_skip_tls_verify || plain) && !allow_insecure {
        return Err(format!(
            "{}: {}, which is refused: anybody in between could answer; `kubernetes.api.allow_insecure: true` in the profile accepts it",
            path.display(),
            if plain {
                "the URL of the cluster's server has no TLS"
            } else {
                "insecure-skip-tls-verify is true"
            }
        ));
    }
    if cluster.tls_server_name.is_some() {
        return Err(format!(
            "{}: tls-server-name is not supported; name the server as its certificate does",
            path.display()
        ));
    }
    let certificate_authority = data_or_file(
        path,
        "certificate-authority",
        cluster.certificate_authority_data.as_deref(),
        cluster.certificate_authority.as_deref(),
    )?;
    Ok(Credentials {
        server: cluster.server.clone(),
        certificate_authority: certificate_authority.map(String::into_bytes),
        insecure_skip_tls_verify: cluster.insecure_skip_tls_verify,
        proxy: cluster.proxy_url.clone(),
        ..Credentials::default()
    })
}

fn add_user(
    credentials: &mut Credentials,
    path: &Path,
    user: &User,
    cluster: &Cluster,
    interrupt: &Interrupt,
) -> Result<(), String> {
    if user.auth_provider.is_some() || user.username.is_some() {
        return Err(format!(
            "{}: auth-provider and user names with passwords are not supported, nor are they by current clusters; use an exec plugin",
            path.display()
        ));
    }
    let certificate = data_or_file(
        path,
        "client-certificate",
        user.client_certificate_data.as_deref(),
        user.client_certificate.as_deref(),
    )?;
    let key = data_or_file(
        path,
        "client-key",
        user.client_key_data.as_deref(),
        user.client_key.as_deref(),
    )?;
    credentials.client_identity = match (certificate, key) {
        (Some(certificate), Some(key)) => Some(Secret(format!("{key}\n{certificate}"))),
        (None, None) => None,
        _ => {
            return Err(format!(
                "{}: client-certificate and client-key belong together, one is missing",
                path.display()
            ));
        }
    };
    // kubectl takes a token over the file.
    if let Some(token) = user.token.as_deref().filter(|it| !it.is_empty()) {
        credentials.token = Some(Secret::new(token));
    } else if let Some(file) = &user.token_file {
        credentials.token = Some(Secret(read_text(&beside(path, file))?));
    } else if let Some(exec) = &user.exec {
        add_exec(credentials, path, exec, cluster, interrupt)?;
    }
    Ok(())
}

/// Paths in a kubeconfig are relative to its folder.
fn beside(kubeconfig: &Path, path: &Path) -> PathBuf {
    kubeconfig.parent().unwrap_or(Path::new("")).join(path)
}

fn data_or_file(
    kubeconfig: &Path,
    what: &str,
    data: Option<&str>,
    file: Option<&Path>,
) -> Result<Option<String>, String> {
    if let Some(data) = data.filter(|it| !it.is_empty()) {
        let text = decode_base64(data).and_then(|it| String::from_utf8(it).ok());
        return text
            .map(Some)
            .ok_or_else(|| format!("{}: {what}-data is not base64 of PEM", kubeconfig.display()));
    }
    match file.filter(|it| !it.as_os_str().is_empty()) {
        Some(file) => read_text(&beside(kubeconfig, file)).map(Some),
        None => Ok(None),
    }
}

/// Base64, as files hold it: with line breaks or without.
fn decode_base64(text: &str) -> Option<Vec<u8>> {
    use base64::Engine as _;
    let compact: String = text.split_ascii_whitespace().collect();
    base64::engine::general_purpose::STANDARD
        .decode(compact)
        .ok()
}

/// Runs an exec plugin (`aws eks get-token`) and takes what it answers.
///
/// Source: Kubernetes reference, client-go credential plugins.
fn add_exec(
    credentials: &mut Credentials,
    path: &Path,
    exec: &Exec,
    cluster: &Cluster,
    interrupt: &Interrupt,
) -> Result<(), String> {
    let answer = run_exec(path, exec, cluster, interrupt)?;
    let status = at(&answer, "/status");
    let text = |name: &str| status[name].as_str().filter(|it| !it.is_empty());
    let token = text("token");
    let identity = text("clientCertificateData").zip(text("clientKeyData"));
    if token.is_none() && identity.is_none() {
        return Err(format!(
            "exec plugin {} returned neither a token nor a client certificate",
            exec.command
        ));
    }
    if let Some(token) = token {
        credentials.token = Some(Secret::new(token));
    }
    if let Some((certificate, key)) = identity {
        credentials.client_identity = Some(Secret(format!("{key}\n{certificate}")));
    }
    Ok(())
}

fn run_exec(
    path: &Path,
    exec: &Exec,
    cluster: &Cluster,
    interrupt: &Interrupt,
) -> Result<Value, String> {
    let command = if exec.command.contains('/') {
        beside(path, Path::new(&exec.command)).display().to_string()
    } else {
        exec.command.clone()
    };
    let failed = |why: &str| {
        let hint = exec
            .install_hint
            .as_deref()
            .map(|it| format!(" ({})", it.trim()))
            .unwrap_or_default();
        format!("exec plugin {} {why}{hint}", exec.command)
    };
    let arguments: Vec<OsString> = exec.args.iter().flatten().map(OsString::from).collect();
    let info = exec_info(exec, cluster);
    let mut environment: BTreeMap<&str, String> = exec
        .env
        .iter()
        .flatten()
        .map(|it| (it.name.as_str(), it.value.clone()))
        .collect();
    environment.insert("KUBERNETES_EXEC_INFO", info);
    // A person's own kubeconfig names programs of the person's own PATH; what root starts is the
    // system's.
    if !rustix::process::geteuid().is_root()
        && let Ok(path) = std::env::var("PATH")
    {
        environment.entry("PATH").or_insert(path);
    }
    let environment: Vec<_> = environment
        .into_iter()
        .map(|(name, value)| (name, Some(value)))
        .collect();
    let mut process = WorkerProcess::start_program(&command, &arguments, &environment)
        .map_err(|error| failed(&format!("cannot be started: {error}")))?;
    let mut answer = String::new();
    let mut on_line = |line: &str| {
        answer.push_str(line);
        answer.push('\n');
    };
    match read_output(&mut process, EXEC_DEADLINE, interrupt, &mut on_line) {
        ConversationEnd::Closed(ProcessEnd::Exited(0)) => {}
        ConversationEnd::Closed(ProcessEnd::Exited(status)) => {
            let stderr = process.stderr();
            let last = stderr.lines().last().unwrap_or("and printed nothing");
            return Err(failed(&format!("ended with status {status}: {last}")));
        }
        ConversationEnd::Closed(ProcessEnd::Killed(signal)) => {
            return Err(failed(&format!("was ended by signal {signal}")));
        }
        ConversationEnd::Closed(ProcessEnd::Stuck) => return Err(failed("did not end")),
        ConversationEnd::TimedOut { .. } => {
            let seconds = EXEC_DEADLINE.as_secs();
            return Err(failed(&format!("did not answer within {seconds} s")));
        }
        ConversationEnd::Interrupted | ConversationEnd::Dismissed | ConversationEnd::Complete => {
            return Err("the run was interrupted".to_owned());
        }
    }
    // What is not understood may hold the token, so it is not repeated.
    serde_json::from_str(&answer).map_err(|_| failed("did not answer with an ExecCredential"))
}

/// The information about its caller that an exec plugin gets.
fn exec_info(exec: &Exec, cluster: &Cluster) -> String {
    let spec = if exec.provide_cluster_info {
        serde_json::json!({
            "interactive": false,
            "cluster": {
                "server": cluster.server,
                "certificate-authority-data": cluster.certificate_authority_data,
            },
        })
    } else {
        serde_json::json!({"interactive": false})
    };
    serde_json::json!({
        "apiVersion": exec.api_version,
        "kind": "ExecCredential",
        "spec": spec,
    })
    .to_string()
}
