//! `gpu-validator generate`: what a package ships in addition to the binary.

use anyhow::Context as _;
use clap_complete::Shell;

use super::terminal::to_stdout;
use validator_core::findings::ExitStatus;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum GenerateCommand {
    /// Print the man page
    Man,
    /// Print completions for a shell
    Completions {
        #[arg(value_enum)]
        shell: Shell,
    },
}

pub(crate) fn generate(
    command: &GenerateCommand,
    mut program: clap::Command,
) -> anyhow::Result<ExitStatus> {
    let mut text = Vec::new();
    match command {
        GenerateCommand::Man => man(program, &mut text).context("the man page cannot be made")?,
        GenerateCommand::Completions { shell } => {
            clap_complete::generate(*shell, &mut program, "gpu-validator", &mut text);
        }
    }
    to_stdout(&String::from_utf8_lossy(&text));
    Ok(ExitStatus::Passed)
}

/// One page: the program, then the options of each command.
fn man(mut program: clap::Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    program.build();
    let page = clap_mangen::Man::new(program.clone());
    page.render_title(text)?;
    page.render_name_section(text)?;
    page.render_synopsis_section(text)?;
    page.render_description_section(text)?;
    page.render_options_section(text)?;
    for command in program.get_subcommands().filter(|it| !it.is_hide_set()) {
        if command.get_name() == "help" {
            continue;
        }
        let heading = format!(".SH \"COMMAND {}\"\n", command.get_name().to_uppercase());
        text.extend_from_slice(heading.as_bytes());
        let of_command = clap_mangen::Man::new(command.clone());
        of_command.render_description_section(text)?;
        of_command.render_synopsis_section(text)?;
        of_command.render_options_section(text)?;
        of_command.render_subcommands_section(text)?;
    }
    page.render_extra_section(text)?;
    page.render_version_section(text)
}
