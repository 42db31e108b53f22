//! The API server, queried over HTTPS with time-outs.

use std::io::Read as _;
use std::time::{Duration, Instant};

use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use serde_json::Value;

use super::credentials::Credentials;
use super::requests::ApiRequest;
use crate::interrupt::Interrupt;
use crate::probe::json::at;

/// Retries of a GET after 429, a 5xx or a broken connection.
const RETRIES_MAXIMUM: u32 = 3;
/// The first pause before a retry of a GET; each further one is twice as long.
const RETRY_PAUSE: Duration = Duration::from_millis(250);
/// A server that requests a longer pause than this is not awaited.
const RETRY_AFTER_MAXIMUM: Duration = Duration::from_secs(10);
/// An answer larger than this is not one to our questions.
const ANSWER_BYTES_MAXIMUM: u64 = 32 << 20;
/// Objects in one page of a list, as kubectl requests them.
const PAGE_LIMIT: &str = "500";
/// Pages that are read of one list at most: more than any node or namespace has.
const PAGES_MAXIMUM: usize = 40;

/// Why a request brought nothing, in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApiError {
    /// The HTTP status, where there was an answer.
    pub(crate) status: Option<u16>,
    pub(crate) text: String,
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.text)
    }
}

impl std::error::Error for ApiError {}

/// The request: the kind of request and the object.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target<'a> {
    pub(crate) request: ApiRequest,
    pub(crate) namespace: Option<&'a str>,
    pub(crate) name: Option<&'a str>,
}

impl<'a> Target<'a> {
    pub(crate) fn object(request: ApiRequest, name: &'a str) -> Self {
        Self {
            request,
            namespace: None,
            name: Some(name),
        }
    }

    pub(crate) fn everywhere(request: ApiRequest) -> Self {
        Self {
            request,
            namespace: None,
            name: None,
        }
    }

    pub(crate) fn in_namespace(request: ApiRequest, namespace: &'a str) -> Self {
        Self {
            request,
            namespace: Some(namespace),
            name: None,
        }
    }

    #[must_use]
    pub(crate) fn named(self, name: &'a str) -> Self {
        Self {
            name: Some(name),
            ..self
        }
    }
}

impl std::fmt::Display for Target<'_> {
    /// `get nodes a`, `list pods in namespace x`.
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let resource = match self.request.resource {
            "" => format!("kinds of {}/{}", self.request.group, self.request.version),
            _ => self.request.resource_name(),
        };
        write!(formatter, "{} {resource}", self.request.verb)?;
        if let Some(name) = self.name {
            write!(formatter, " {name}")?;
        }
        match self.namespace {
            Some(namespace) => write!(formatter, " in namespace {namespace}"),
            None => Ok(()),
        }
    }
}

/// How a PATCH is meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PatchKind {
    /// Lists are replaced as a whole.
    Merge,
    /// Lists of Kubernetes' own types merge by their keys, conditions by `type`.
    StrategicMerge,
    /// Server-side apply: creates the object where it is not there.
    Apply,
}

/// The owner of the fields that a server-side apply writes.
const FIELD_MANAGER: &str = "gpu-validator";

impl PatchKind {
    fn content_type(self) -> &'static str {
        match self {
            Self::Merge => "application/merge-patch+json",
            Self::StrategicMerge => "application/strategic-merge-patch+json",
            // JSON is YAML.
            Self::Apply => "application/apply-patch+yaml",
        }
    }

    fn query(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Merge | Self::StrategicMerge => &[],
            Self::Apply => &[("fieldManager", FIELD_MANAGER), ("force", "true")],
        }
    }
}

/// A connection to one API server as one user.
#[derive(Debug)]
pub(crate) struct ApiClient {
    http: Client,
    server: String,
    authorization: Option<HeaderValue>,
    interrupt: Interrupt,
}

impl ApiClient {
    /// `deadline` bounds each single answer.
    pub(crate) fn new(
        credentials: &Credentials,
        deadline: Duration,
        interrupt: &Interrupt,
    ) -> Result<Self, String> {
        let mut builder = crate::probe::https::client_builder()
            .timeout(deadline)
            .connect_timeout(deadline)
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("gpu-validator/", env!("CARGO_PKG_VERSION")));
        if let Some(certificates) = &credentials.certificate_authority {
            let roots = reqwest::Certificate::from_pem_bundle(certificates)
                .ok()
                .filter(|it| !it.is_empty())
                .ok_or("the certificate authority holds no certificate in PEM")?;
            builder = builder.tls_certs_only(roots);
        } else if credentials.server.starts_with("http://") {
            // Nothing is verified, so the system's certificates need not be read.
            builder = builder.tls_certs_only([]);
        }
        if credentials.insecure_skip_tls_verify {
            builder = builder.tls_danger_accept_invalid_certs(true);
        }
        if let Some(identity) = &credentials.client_identity {
            let identity = reqwest::Identity::from_pem(identity.expose().as_bytes())
                .map_err(|error| format!("the client certificate cannot be used: {error}"))?;
            builder = builder.identity(identity);
        }
        builder = match &credentials.proxy {
            Some(proxy) => builder.proxy(
                reqwest::Proxy::all(proxy)
                    .map_err(|error| format!("proxy-url cannot be used: {error}"))?,
            ),
            None => builder.no_proxy(),
        };
        let http = builder
            .build()
            .map_err(|error| format!("no HTTPS client: {}", causes(&error)))?;
        let authorization = match &credentials.token {
            None => None,
            Some(token) => {
                let mut value = HeaderValue::from_str(&format!("Bearer {}", token.expose().trim()))
                    .map_err(|_| "the token holds characters that no token has")?;
                value.set_sensitive(true);
                Some(value)
            }
        };
        Ok(Self {
            http,
            server: credentials.server.trim_end_matches('/').to_owned(),
            authorization,
            interrupt: interrupt.clone(),
        })
    }

    /// One object, or a subresource of it that is JSON.
    pub(crate) fn get(&self, target: Target<'_>) -> Result<Value, ApiError> {
        let bytes = self.get_bytes(target, &[])?;
        parse(target, &bytes)
    }

    /// A subresource that is text.
    pub(crate) fn get_text(
        &self,
        target: Target<'_>,
        query: &[(&str, &str)],
    ) -> Result<String, ApiError> {
        let bytes = self.get_bytes(target, query)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// All objects of a list, page by page. Where a page's continuation has expired (410), the list
    /// begins anew, once.
    pub(crate) fn list(
        &self,
        target: Target<'_>,
        query: &[(&str, &str)],
    ) -> Result<Vec<Value>, ApiError> {
        match self.list_once(target, query) {
            Err(error) if error.status == Some(410) => self.list_once(target, query),
            listed => listed,
        }
    }

    fn list_once(
        &self,
        target: Target<'_>,
        query: &[(&str, &str)],
    ) -> Result<Vec<Value>, ApiError> {
        let mut items = Vec::new();
        let mut next = String::new();
        for _ in 0..PAGES_MAXIMUM {
            let mut page_query = query.to_vec();
            page_query.push(("limit", PAGE_LIMIT));
            if !next.is_empty() {
                page_query.push(("continue", &next));
            }
            let mut page = parse(target, &self.get_bytes(target, &page_query)?)?;
            match page.get_mut("items").map(Value::take) {
                Some(Value::Array(page_items)) => items.extend(page_items),
                None | Some(Value::Null)
                    if at(&page, "/kind")
                        .as_str()
                        .is_some_and(|it| it.ends_with("List")) => {}
                _ => return Err(error(target, None, "the answer is not a list")),
            }
            at(&page, "/metadata/continue")
                .as_str()
                .unwrap_or_default()
                .clone_into(&mut next);
            if next.is_empty() {
                return Ok(items);
            }
        }
        Err(error(target, None, "the list has no end"))
    }

    /// Changes an object; never repeated, since the first may have been accepted.
    pub(crate) fn patch(
        &self,
        target: Target<'_>,
        kind: PatchKind,
        patch: &Value,
    ) -> Result<Value, ApiError> {
        let request = self
            .http
            .patch(self.url(target, kind.query()))
            .header(CONTENT_TYPE, kind.content_type())
            .body(patch.to_string());
        let bytes = self.ask(target, request).map_err(|failure| failure.error)?;
        parse(target, &bytes)
    }

    /// Creates an object; never repeated.
    pub(crate) fn create(&self, target: Target<'_>, object: &Value) -> Result<Value, ApiError> {
        let request = self
            .http
            .post(self.url(target, &[]))
            .header(CONTENT_TYPE, "application/json")
            .body(object.to_string());
        let bytes = self.ask(target, request).map_err(|failure| failure.error)?;
        parse(target, &bytes)
    }

    /// Deletes an object; `false` where it was not there.
    pub(crate) fn delete(&self, target: Target<'_>) -> Result<bool, ApiError> {
        match self.ask(target, self.http.delete(self.url(target, &[]))) {
            Ok(_) => Ok(true),
            Err(failure) if failure.error.status == Some(404) => Ok(false),
            Err(failure) => Err(failure.error),
        }
    }

    /// Deletes all objects of a namespace that have the label.
    pub(crate) fn delete_collection(
        &self,
        target: Target<'_>,
        label_selector: &str,
        grace_period_s: u32,
    ) -> Result<(), ApiError> {
        let options = serde_json::json!({
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "gracePeriodSeconds": grace_period_s,
            "propagationPolicy": "Background",
        });
        let request = self
            .http
            .delete(self.url(target, &[("labelSelector", label_selector)]))
            .header(CONTENT_TYPE, "application/json")
            .body(options.to_string());
        self.ask(target, request)
            .map(|_| ())
            .map_err(|failure| failure.error)
    }

    fn get_bytes(&self, target: Target<'_>, query: &[(&str, &str)]) -> Result<Vec<u8>, ApiError> {
        let mut pause = RETRY_PAUSE;
        let mut retries = 0;
        loop {
            let failure = match self.ask(target, self.http.get(self.url(target, query))) {
                Ok(bytes) => return Ok(bytes),
                Err(failure) => failure,
            };
            let wait = failure.retry_after.unwrap_or(pause);
            if !failure.may_pass || wait > RETRY_AFTER_MAXIMUM {
                return Err(failure.error);
            }
            if retries == RETRIES_MAXIMUM {
                let mut error = failure.error;
                error.text = format!("{} ({} attempts)", error.text, RETRIES_MAXIMUM + 1);
                return Err(error);
            }
            if !wait_unless_interrupted(wait, &self.interrupt) {
                return Err(failure.error);
            }
            retries += 1;
            pause *= 2;
        }
    }

    fn url(&self, target: Target<'_>, query: &[(&str, &str)]) -> String {
        let path = target.request.path(target.namespace, target.name);
        let mut url = format!("{}{path}", self.server);
        for (index, (name, value)) in query.iter().enumerate() {
            url.push(if index == 0 { '?' } else { '&' });
            url.push_str(name);
            url.push('=');
            percent_encode(value, &mut url);
        }
        url
    }

    fn ask(&self, target: Target<'_>, request: RequestBuilder) -> Result<Vec<u8>, Failure> {
        let request = match &self.authorization {
            Some(value) => request.header(AUTHORIZATION, value.clone()),
            None => request,
        };
        let response = request
            .header("Accept", "application/json, */*")
            .send()
            .map_err(|error| transport(target, &error))?;
        let status = response.status().as_u16();
        let retry_after = retry_after(&response);
        let body = read_body(target, response)?;
        if (200..300).contains(&status) {
            return Ok(body);
        }
        Err(Failure {
            error: refused(target, status, &body),
            may_pass: status == 429 || status >= 500,
            retry_after,
        })
    }
}

/// A failed request, and whether a retry may succeed.
struct Failure {
    error: ApiError,
    may_pass: bool,
    retry_after: Option<Duration>,
}

/// Waits, unless the run is stopped meanwhile: then it answers `false`.
pub(crate) fn wait_unless_interrupted(wait: Duration, interrupt: &Interrupt) -> bool {
    const LOOK: Duration = Duration::from_millis(20);
    let until = Instant::now() + wait;
    loop {
        if interrupt.signal().is_some() {
            return false;
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return true;
        }
        std::thread::sleep(left.min(LOOK));
    }
}

fn retry_after(response: &Response) -> Option<Duration> {
    // The API server gives seconds; the date that HTTP also allows is left to our own pause.
    let seconds = response.headers().get(RETRY_AFTER)?.to_str().ok()?;
    Some(Duration::from_secs(seconds.trim().parse().ok()?))
}

fn read_body(target: Target<'_>, response: Response) -> Result<Vec<u8>, Failure> {
    let mut body = Vec::new();
    let read = response
        .take(ANSWER_BYTES_MAXIMUM + 1)
        .read_to_end(&mut body);
    if body.len() as u64 > ANSWER_BYTES_MAXIMUM {
        return Err(Failure {
            error: error(target, None, "the answer is larger than 32 MiB"),
            may_pass: false,
            retry_after: None,
        });
    }
    read.map_err(|cause| Failure {
        error: error(
            target,
            None,
            &format!("the connection was cut before the answer was whole: {cause}"),
        ),
        may_pass: true,
        retry_after: None,
    })?;
    Ok(body)
}

fn error(target: Target<'_>, status: Option<u16>, text: &str) -> ApiError {
    ApiError {
        status,
        text: format!("{target}: {text}"),
    }
}

fn transport(target: Target<'_>, cause: &reqwest::Error) -> Failure {
    let causes = causes(cause);
    let text = if cause.is_timeout() {
        "the API server did not answer in time".to_owned()
    } else if let Some(meaning) = distrusted(&causes) {
        format!("{meaning} ({causes})")
    } else if cause.is_connect() {
        format!("the API server cannot be reached: {causes}")
    } else {
        format!("the connection broke: {causes}")
    };
    Failure {
        error: error(target, None, &text),
        // A certificate that is not trusted stays so.
        may_pass: !causes.contains("certificate"),
        retry_after: None,
    }
}

/// rustls's objection to the server's certificate, and its meaning; the first that fits.
const DISTRUSTED: [(&[&str], &str); 3] = [
    (
        &["UnknownIssuer"],
        "the API server's certificate is not signed by the certificate authority of the credentials: they are of another cluster",
    ),
    (
        &["Expired", "expired", "NotValidYet", "not valid yet"],
        "the API server's certificate is not valid at this time, or this machine's clock is wrong",
    ),
    (
        &["NotValidForName", "not valid for name"],
        "the API server's certificate is for another host name",
    ),
];

fn distrusted(causes: &str) -> Option<&'static str> {
    let (_, said) = causes.split_once("invalid peer certificate")?;
    DISTRUSTED
        .iter()
        .find(|(words, _)| words.iter().any(|word| said.contains(word)))
        .map(|(_, meaning)| *meaning)
}

/// The causes below an error, without its own text, which only repeats the request.
pub(super) fn causes(error: &(dyn std::error::Error + 'static)) -> String {
    let mut causes = Vec::new();
    let mut next = error.source();
    while let Some(cause) = next {
        let text = cause.to_string();
        if causes.last() != Some(&text) {
            causes.push(text);
        }
        next = cause.source();
    }
    if causes.is_empty() {
        error.to_string()
    } else {
        causes.join(": ")
    }
}

/// What the server's refusal means, with its own words.
fn refused(target: Target<'_>, status: u16, body: &[u8]) -> ApiError {
    let message = serde_json::from_slice::<Value>(body)
        .ok()
        .and_then(|it| at(&it, "/message").as_str().map(str::to_owned))
        .unwrap_or_default();
    let said = if message.is_empty() {
        String::new()
    } else {
        format!(": {message}")
    };
    let request = target.request;
    let text = match status {
        401 => format!(
            "the API server does not accept the credentials (401){said}; the token has expired or is of another cluster"
        ),
        403 => format!(
            "not allowed (403): RBAC grants this user no verb `{}` on resource `{}`{}{said}; `gpu-validator kubernetes rbac` prints the rules that do",
            request.verb,
            request.resource_name(),
            if request.group.is_empty() {
                String::new()
            } else {
                format!(" of API group `{}`", request.group)
            },
        ),
        404 => format!("there is no such object (404){said}"),
        409 => format!("the object was changed or exists already (409){said}"),
        410 => format!("the requested version has expired (410){said}"),
        429 => format!("the API server is overloaded (429){said}"),
        500..600 => format!("the API server failed ({status}){said}"),
        _ => format!("the API server returned {status}{said}"),
    };
    error(target, Some(status), &text)
}

fn parse(target: Target<'_>, bytes: &[u8]) -> Result<Value, ApiError> {
    let value: Value = serde_json::from_slice(bytes)
        .map_err(|cause| error(target, None, &format!("the answer is not JSON: {cause}")))?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(error(target, None, "the answer is not an object"))
    }
}

/// An answer, as [`crate::fuzzing`] makes it.
#[cfg(any(test, feature = "fuzzing"))]
pub(super) fn read_any(bytes: &[u8]) -> Option<Value> {
    let target = Target::everywhere(super::requests::LIST_RUNTIME_CLASSES);
    for status in [401, 403, 404, 409, 500] {
        let _ = refused(target, status, bytes);
    }
    parse(target, bytes).ok()
}

/// Encodes what is not unreserved in a URL (RFC 3986, section 2.3).
fn percent_encode(text: &str, url: &mut String) {
    use std::fmt::Write as _;
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            url.push(char::from(byte));
        } else {
            let _ = write!(url, "%{byte:02X}");
        }
    }
}
