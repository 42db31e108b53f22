//! The labels of this runner at GitHub: without its own, no job is sent to it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, anyhow, bail, ensure};
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::{Method, StatusCode};
use serde::Deserialize;

use crate::probe::https::client_builder;

/// How to reach the runner at GitHub.
#[derive(Debug)]
pub(crate) struct RunnerLabels {
    client: Client,
    /// `https://api.github.com/repos/owner/name/actions/runners`
    runners_url: String,
    runner: String,
    token: Token,
    pause: Duration,
}

/// What is needed to reach it.
#[derive(Clone, Debug)]
pub(crate) struct ApiAccess {
    /// `GITHUB_API_URL`
    pub(crate) api_url: String,
    /// Where the runner is registered: `repos/owner/name`, `orgs/name` or `enterprises/name`.
    pub(crate) scope: String,
    pub(crate) token: Token,
    /// Every wait times this; 1 but in tests.
    pub(crate) wait_scale: f64,
}

/// A secret that no message shows.
#[derive(Clone)]
pub(crate) struct Token(String);

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

impl Token {
    /// From the file, else from the environment; `None` where neither was given.
    pub(crate) fn read(
        file: Option<&PathBuf>,
        variable: Option<String>,
    ) -> anyhow::Result<Option<Self>> {
        let text = match (file, variable) {
            (Some(path), _) => std::fs::read_to_string(path)
                .with_context(|| format!("token file {} cannot be read", path.display()))?,
            (None, Some(value)) if !value.is_empty() => value,
            (None, _) => return Ok(None),
        };
        let token = text.trim().to_owned();
        ensure!(
            !token.is_empty() && token.bytes().all(|it| it.is_ascii_graphic()),
            "the token is empty or holds characters that no token has"
        );
        Ok(Some(Self(token)))
    }
}

/// An answer that takes longer is none.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
/// Attempts in all with a service that answers "later" or not at all.
const ATTEMPTS: u32 = 3;
/// Before the second attempt; twice as long before the third.
const PAUSE: Duration = Duration::from_millis(500);
/// Source: GitHub's REST API, versions.
const API_VERSION: &str = "2022-11-28";
/// Names come from GitHub, where 64 characters are the limit; more than that many labels is no
/// answer of GitHub's.
const LABELS_MAXIMUM: usize = 100;

#[derive(Debug, Deserialize)]
struct Runners {
    runners: Vec<Runner>,
}

#[derive(Debug, Deserialize)]
struct Runner {
    id: u64,
    name: String,
    labels: Vec<Label>,
}

#[derive(Debug, Deserialize)]
struct Label {
    name: String,
    /// `read-only` or `custom`.
    #[serde(rename = "type")]
    kind: String,
}

impl RunnerLabels {
    pub(crate) fn new(access: ApiAccess, runner: &str) -> anyhow::Result<Self> {
        ensure!(
            !runner.is_empty(),
            "RUNNER_NAME is not set, so that the runner cannot be found at GitHub"
        );
        let api_url = access.api_url.trim_end_matches('/');
        let url = reqwest::Url::parse(api_url)
            .with_context(|| format!("{api_url} is not the address of an API"))?;
        let is_local = matches!(url.host_str(), Some("127.0.0.1" | "[::1]" | "localhost"));
        ensure!(
            url.scheme() == "https" || is_local,
            "{api_url} is not https, and the token would be readable on its way"
        );
        let scope = access.scope.trim_matches('/');
        let parts: Vec<&str> = scope.split('/').collect();
        let is_scope = match parts[..] {
            ["repos", owner, name] => !owner.is_empty() && !name.is_empty(),
            ["orgs" | "enterprises", name] => !name.is_empty(),
            _ => false,
        };
        let is_plain = scope
            .bytes()
            .all(|it| it.is_ascii_alphanumeric() || b"-_./".contains(&it));
        ensure!(
            is_scope && is_plain && !scope.contains(".."),
            "`{scope}` does not name where the runner is registered: repos/OWNER/NAME, orgs/NAME or enterprises/NAME"
        );
        let client = client_builder()
            .user_agent(concat!("gpu-validator/", env!("CARGO_PKG_VERSION")))
            .timeout(REQUEST_DEADLINE.mul_f64(access.wait_scale))
            // The token is for this server alone.
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .context("no HTTP client can be made")?;
        Ok(Self {
            client,
            runners_url: format!("{api_url}/{scope}/actions/runners"),
            runner: runner.to_owned(),
            token: access.token,
            pause: PAUSE.mul_f64(access.wait_scale),
        })
    }

    /// Takes every label from the runner that was given to it, and returns them. GitHub's own
    /// (`self-hosted`, `linux`, `x64`) stay: they cannot be taken.
    pub(crate) fn remove(&self) -> anyhow::Result<Vec<String>> {
        let runner = self.find()?;
        let custom = |label: &&Label| label.kind == "custom";
        let labels: Vec<String> = runner
            .labels
            .iter()
            .filter(custom)
            .map(|it| it.name.clone())
            .collect();
        if !labels.is_empty() {
            let url = format!("{}/{}/labels", self.runners_url, runner.id);
            self.ask(&|| self.client.request(Method::DELETE, &url))?;
        }
        Ok(labels)
    }

    /// Gives labels back.
    pub(crate) fn restore(&self, labels: &[String]) -> anyhow::Result<()> {
        if labels.is_empty() {
            return Ok(());
        }
        let url = format!("{}/{}/labels", self.runners_url, self.find()?.id);
        let body = serde_json::json!({ "labels": labels });
        self.ask(&|| self.client.request(Method::POST, &url).json(&body))?;
        Ok(())
    }

    fn find(&self) -> anyhow::Result<Runner> {
        let named = [("name", self.runner.as_str()), ("per_page", "100")];
        let url = reqwest::Url::parse_with_params(&self.runners_url, named)
            .with_context(|| format!("{} is not an address", self.runners_url))?;
        let response = self.ask(&|| self.client.get(url.clone()))?;
        let answer: Runners = response.json().with_context(|| {
            format!("{} did not answer with a list of runners", self.runners_url)
        })?;
        let runner = answer
            .runners
            .into_iter()
            .find(|it| it.name == self.runner)
            .ok_or_else(|| {
                anyhow!(
                    "{} lists no runner {}; name where it is registered (--runner-scope)",
                    self.runners_url,
                    self.runner
                )
            })?;
        ensure!(
            runner.labels.len() <= LABELS_MAXIMUM,
            "{} names too many labels",
            self.runners_url
        );
        Ok(runner)
    }

    /// Sends requests until there is an answer that another attempt would not change, [`ATTEMPTS`]
    /// times at most.
    fn ask(&self, request: &dyn Fn() -> RequestBuilder) -> anyhow::Result<Response> {
        let mut pause = self.pause;
        let mut trouble = String::new();
        for attempt in 0..ATTEMPTS {
            if attempt > 0 {
                std::thread::sleep(pause);
                pause *= 2;
            }
            let answer = request()
                .bearer_auth(&self.token.0)
                .header("Accept", "application/vnd.github+json")
                .header("X-GitHub-Api-Version", API_VERSION)
                .send();
            trouble = match answer {
                Ok(response) if response.status().is_success() => return Ok(response),
                Ok(response) if !may_pass(response.status()) => {
                    bail!("{}", refusal(&response, &self.runners_url));
                }
                Ok(response) => format!("answers {}", response.status()),
                Err(error) if error.is_timeout() => "does not answer in time".to_owned(),
                // The address is in the message already, and once is enough.
                Err(error) => format!("cannot be reached: {:#}", anyhow!(error.without_url())),
            };
        }
        bail!("{} {trouble}, after {ATTEMPTS} attempts", self.runners_url)
    }
}

fn may_pass(status: StatusCode) -> bool {
    status.is_server_error()
        || status == StatusCode::TOO_MANY_REQUESTS
        || status == StatusCode::REQUEST_TIMEOUT
}

/// What an answer means that will not change, with the next step.
fn refusal(response: &Response, url: &str) -> String {
    let status = response.status();
    let is_zero = |name| response.headers().get(name).is_some_and(|it| it == "0");
    let step = match status {
        StatusCode::UNAUTHORIZED => "the token is wrong or has expired; make a new one",
        StatusCode::FORBIDDEN if is_zero("x-ratelimit-remaining") => {
            "the token's hourly limit of requests is used up"
        }
        StatusCode::FORBIDDEN => {
            "the token may not manage runners; it needs `Administration: write` of the repository, or `Self-hosted runners: write` of the organization"
        }
        StatusCode::NOT_FOUND => {
            "the runner is registered elsewhere (--runner-scope), or the token may not see it"
        }
        _ => "this is no answer that GitHub's API documents",
    };
    format!("{url} answers {status}: {step}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(api_url: &str, scope: &str) -> ApiAccess {
        ApiAccess {
            api_url: api_url.to_owned(),
            scope: scope.to_owned(),
            token: Token("secret".to_owned()),
            wait_scale: 1.0,
        }
    }

    #[test]
    fn a_token_never_travels_in_the_clear_or_to_a_place_that_is_no_scope() {
        let made = |url: &str, scope: &str| {
            RunnerLabels::new(access(url, scope), "gpu-1").map(|it| it.runners_url)
        };
        assert_eq!(
            made("https://api.github.com/", "repos/o/n").expect("made"),
            "https://api.github.com/repos/o/n/actions/runners"
        );
        assert!(made("http://127.0.0.1:1", "orgs/o").is_ok());
        for (url, scope) in [
            ("http://api.github.com", "orgs/o"),
            ("ftp://localhost.example", "orgs/o"),
            ("not an address", "orgs/o"),
            ("https://api.github.com", "o/n"),
            ("https://api.github.com", "repos/o"),
            ("https://api.github.com", "orgs/"),
            ("https://api.github.com", "repos/../n"),
            ("https://api.github.com", "orgs/o?x"),
        ] {
            assert!(made(url, scope).is_err(), "{url} {scope}");
        }
        assert!(RunnerLabels::new(access("https://api.github.com", "orgs/o"), "").is_err());
    }

    #[test]
    fn a_token_comes_from_its_file_before_the_environment_and_is_never_shown() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("token");
        std::fs::write(&file, "of-the-file\n").expect("written");
        let token = Token::read(Some(&file), Some("of-the-environment".to_owned())).expect("read");
        assert_eq!(token.expect("given").0, "of-the-file");
        let token = Token::read(None, Some("of-the-environment".to_owned()))
            .expect("read")
            .expect("given");
        assert_eq!(token.0, "of-the-environment");
        assert!(!format!("{token:?}").contains("environment"));
        assert!(Token::read(None, None).expect("read").is_none());
        assert!(
            Token::read(None, Some(String::new()))
                .expect("read")
                .is_none()
        );
        std::fs::write(&file, " \n").expect("written");
        assert!(Token::read(Some(&file), None).is_err());
        assert!(Token::read(Some(&folder.path().join("none")), None).is_err());
    }
}
