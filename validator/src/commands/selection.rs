//! `--only`, `--skip` and `--gpu` of `run` and `judge`.

use validator_core::selection::Selection;

#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct SelectionOptions {
    /// Judge only these checks; the run is then incomplete (exit code 2 where nothing fails), and
    /// the coverage names the others
    #[arg(long, value_name = "CHECKS", value_delimiter = ',')]
    only: Vec<String>,
    /// Leave these checks out, likewise
    #[arg(long, value_name = "CHECKS", value_delimiter = ',')]
    skip: Vec<String>,
    /// Judge, and work, only these GPUs, by index, PCI address or UUID; likewise. Checks of the
    /// host and of Python environments are judged as a whole
    #[arg(long, value_name = "LIST", value_delimiter = ',')]
    pub(crate) gpu: Vec<String>,
}

impl SelectionOptions {
    pub(crate) fn selection(&self) -> anyhow::Result<Selection> {
        let selection = Selection::new(&self.only, &self.skip).map_err(anyhow::Error::msg)?;
        Ok(selection.on_gpus(&self.gpu))
    }

    pub(crate) fn is_given(&self) -> bool {
        !self.only.is_empty() || !self.skip.is_empty() || !self.gpu.is_empty()
    }
}
