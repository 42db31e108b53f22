//! JSON schemas that stand for the keys of another program.

use std::path::Path;

use anyhow::ensure;
use xshell::{Shell, cmd};

use crate::tools::LINTERS;

/// Writes `text` with `wrong` in place of `word` to `copy`, which the schema must refuse for it: one
/// that accepts a misspelt key proves nothing about the others.
pub fn refuses(
    shell: &Shell,
    schema: &Path,
    text: &str,
    (word, wrong): (&str, &str),
    copy: &Path,
) -> anyhow::Result<()> {
    let misspelt = text.replace(word, wrong);
    ensure!(misspelt != text, "{} has no {word}", copy.display());
    shell.write_file(copy, misspelt)?;
    let checker = LINTERS.install()?.join("check-jsonschema");
    let output = cmd!(shell, "{checker} --schemafile {schema} {copy}")
        .quiet()
        .ignore_status()
        .output()?;
    let output_text = String::from_utf8_lossy(&output.stdout);
    ensure!(
        !output.status.success() && output_text.contains(wrong),
        "{} accepts {wrong}: {output_text}",
        schema.display()
    );
    Ok(())
}
