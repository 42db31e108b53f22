//! Python environments as subjects of findings: which are judged, and how they are named.

use crate::environment::installed::{self, packages_of, requirement};
use crate::facts::{Facts, Framework, PythonEnvironment};
use crate::findings::{EnvironmentSubject, Outcome};
use crate::profile::Profile;

/// An environment as the subject of a finding.
pub fn of(environment: &PythonEnvironment) -> EnvironmentSubject {
    EnvironmentSubject {
        path: environment.prefix.clone(),
    }
}

/// The environments that a check judges: with a framework, those that have it; else those with a
/// GPU package and those that are named. `Err` where no environment was read.
pub(crate) fn judged<'f>(
    facts: &'f Facts,
    profile: &Profile,
    framework: Option<Framework>,
) -> Result<Vec<&'f PythonEnvironment>, Outcome> {
    let seen = installed::seen(facts, profile)?;
    let is_judged = |it: &&PythonEnvironment| match framework {
        Some(framework) => !packages_of(it, framework).is_empty(),
        None => !it.packages.is_empty() || it.named || requirement(it, profile).is_some(),
    };
    Ok(seen.pythons.iter().filter(is_judged).collect())
}

/// Environments that the profile demands and that are not there.
pub(crate) fn absent(facts: &Facts, profile: &Profile) -> Vec<EnvironmentSubject> {
    let pythons = facts.environment.as_ref().map(|it| it.pythons.as_slice());
    let pythons = pythons.unwrap_or_default();
    let is_there = |path: &str| {
        pythons
            .iter()
            .any(|it| requirement(it, profile).is_some_and(|it| it.path == path))
    };
    profile
        .python
        .iter()
        .filter(|it| !is_there(&it.path))
        .map(|it| EnvironmentSubject {
            path: it.path.trim_end_matches('/').to_owned(),
        })
        .collect()
}

/// The outcome where no environment is judged.
pub(crate) fn nothing(framework: Option<Framework>) -> Outcome {
    Outcome::skip(match framework {
        Some(framework) => format!("no Python environment has {}", framework.name()),
        None => "no Python environment has a GPU package".to_owned(),
    })
}
