//! `cargo xtask accessibility`: axe-core over the expected HTML reports, in Chromium and in both
//! themes.
//!
//! The reports themselves have no script: axe runs in a copy.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use serde::Deserialize;
use xshell::{Shell, cmd};

use crate::tools::AXE;
use crate::workspace;

/// Where axe is in its package.
const AXE_SCRIPT: &str = "axe_playwright_python/axe.min.js";
/// Every kind of table, plot and banner.
const PAGES: [&str; 4] = ["burned", "failing", "no_gpu", "simulated"];
/// A paragraph whose contrast is far below WCAG's 4.5 in either theme: axe must find it.
const LOW_CONTRAST: &str = r#"<p style="color:#777;background:#888">low contrast</p>"#;

/// Chromium's own numbers (`preferredColorScheme` of its settings).
const THEMES: [(&str, u8); 2] = [("dark", 0), ("light", 1)];

/// The answer of axe for one page.
#[derive(Debug, Default, Deserialize, PartialEq, Eq)]
struct Answer {
    is_dark: bool,
    passes: u32,
    violations: Vec<Violation>,
}

#[derive(Debug, Deserialize, PartialEq, Eq)]
struct Violation {
    rule: String,
    elements: Vec<String>,
}

pub(crate) fn run() -> anyhow::Result<()> {
    let shell = workspace::shell()?;
    let browser = browser()?;
    let axe = shell.read_file(axe_script(&AXE.install()?)?)?;
    let golden = workspace::root().join("tests/golden");
    let page = |name: &str| shell.read_file(golden.join(format!("{name}.html")));

    let bad = page(PAGES[0])?.replace("</main>", &format!("{LOW_CONTRAST}</main>"));
    for theme in THEMES {
        let answer = examine(&shell, &browser, &axe, &bad, theme)?;
        let found = answer
            .violations
            .iter()
            .any(|it| it.rule == "color-contrast");
        ensure!(
            found,
            "axe misses a paragraph of low contrast ({} theme)",
            theme.0
        );
        for name in PAGES {
            let answer = examine(&shell, &browser, &axe, &page(name)?, theme)?;
            ensure!(
                answer.violations.is_empty(),
                "{name}.html ({} theme): {:#?}",
                theme.0,
                answer.violations
            );
            println!(
                "{name}.html, {} theme: {} rules pass",
                theme.0, answer.passes
            );
        }
    }
    Ok(())
}

fn browser() -> anyhow::Result<PathBuf> {
    let names = ["chromium", "chromium-browser", "google-chrome"];
    names
        .into_iter()
        .find_map(workspace::in_path)
        .context("Chromium is missing; install it (Debian: apt-get install chromium)")
}

/// The package's folder in its virtual environment, whose programs are in `programs`.
fn axe_script(programs: &Path) -> anyhow::Result<PathBuf> {
    let libraries = programs
        .parent()
        .context("no virtual environment")?
        .join("lib");
    let entries = std::fs::read_dir(&libraries)
        .with_context(|| format!("{} cannot be read", libraries.display()))?;
    let pythons = entries.flatten().map(|it| it.path().join("site-packages"));
    let mut scripts = pythons.map(|it| it.join(AXE_SCRIPT));
    let script = scripts.find(|it| it.exists());
    script.with_context(|| format!("{} holds no {AXE_SCRIPT}", libraries.display()))
}

/// Runs axe over `page` in this theme.
fn examine(
    shell: &Shell,
    browser: &Path,
    axe: &str,
    page: &str,
    (theme, number): (&str, u8),
) -> anyhow::Result<Answer> {
    let folder = shell.create_temp_dir()?;
    let copy = folder.path().join("report.html");
    shell.write_file(&copy, with_axe(page, axe)?)?;
    let profile = folder.path().join("profile");
    let options = [
        "--headless=new".to_owned(),
        // The sandbox needs rights that containers do not have; the page is our own.
        "--no-sandbox".to_owned(),
        "--disable-gpu".to_owned(),
        format!("--user-data-dir={}", profile.display()),
        "--virtual-time-budget=20000".to_owned(),
        format!("--blink-settings=preferredColorScheme={number}"),
        "--dump-dom".to_owned(),
        format!("file://{}", copy.display()),
    ];
    let dom = cmd!(shell, "{browser} {options...}")
        .quiet()
        .ignore_stderr()
        .read()?;
    let answer = answer_in(&dom)?;
    ensure!(
        answer.passes > 20,
        "axe applied only {} rules",
        answer.passes
    );
    ensure!(
        answer.is_dark == (theme == "dark"),
        "Chromium did not show the {theme} theme"
    );
    Ok(answer)
}

/// `page` with axe and its answer in an element `axe`.
fn with_axe(page: &str, axe: &str) -> anyhow::Result<String> {
    let (start, end) = page.rsplit_once("</body>").context("the page has no end")?;
    Ok(format!(
        r#"{start}<script>{}</script><script>
axe.run(document, {{resultTypes: ["violations"]}}).then(found => {{
  const answer = document.createElement("pre");
  answer.id = "axe";
  answer.textContent = JSON.stringify({{
    is_dark: matchMedia("(prefers-color-scheme: dark)").matches,
    passes: found.passes.length,
    violations: found.violations.map(it => ({{
      rule: it.id,
      elements: it.nodes.map(node => node.target.join(" ") + ": " + node.failureSummary),
    }})),
  }});
  document.body.append(answer);
}});
</script></body>{end}"#,
        axe.replace("</script", "<\\/script")
    ))
}

fn answer_in(dom: &str) -> anyhow::Result<Answer> {
    let Some((_, answer)) = dom.rsplit_once(r#"<pre id="axe">"#) else {
        bail!("axe did not answer");
    };
    let (answer, _) = answer
        .split_once("</pre>")
        .context("the answer has no end")?;
    let json = answer
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&");
    serde_json::from_str(&json).context("the answer of axe")
}

#[cfg(test)]
mod tests {
    use super::{Answer, Violation, answer_in, with_axe};

    #[test]
    fn axe_stands_at_the_end_of_the_page() {
        let page = with_axe("<body><main></main></body></html>", "a</script>b").expect("a page");
        assert!(
            page.starts_with("<body><main></main><script>a<\\/script>b</script>"),
            "{page}"
        );
        assert!(page.ends_with("</script></body></html>"), "{page}");
        assert!(with_axe("no page", "").is_err());
    }

    #[test]
    fn an_answer_is_read_from_the_page() {
        let dom = r#"<pre id="axe">{"is_dark":true,"passes":30,"violations":[{"rule":"r","elements":["p &gt; a: &lt;&amp;"]}]}</pre>"#;
        let violation = Violation {
            rule: "r".to_owned(),
            elements: vec!["p > a: <&".to_owned()],
        };
        let expected = Answer {
            is_dark: true,
            passes: 30,
            violations: vec![violation],
        };
        assert_eq!(answer_in(dom).expect("an answer"), expected);
        let error = answer_in("<pre></pre>").expect_err("none");
        assert_eq!(error.to_string(), "axe did not answer");
    }
}
