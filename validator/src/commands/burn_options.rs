//! The burn of `run` and `collect`: level, then profile, then the command line.

use std::str::FromStr;
use std::time::Duration;

use anyhow::bail;

use crate::plan::{AllocationOptions, BurnOptions, MemoryShare};
use validator_core::facts::Precision;
use validator_core::level::Level;
use validator_core::plan::EngineChoice;
use validator_core::profile::{BURN_SECONDS, Profile};

/// Options of the burn at level standard (10 s) and extended (60 s, several precisions).
#[derive(Debug, clap::Args)]
pub(crate) struct BurnOfRun {
    /// Do not burn, whatever level and profile require
    #[arg(long, env = "GPU_VALIDATOR_NO_BURN")]
    no_burn: bool,
    /// How long to burn, all precisions together: 10s, 5m [default: 10s; 60s at level extended]
    #[arg(long, value_name = "TIME", env = "GPU_VALIDATOR_BURN_DURATION")]
    burn_duration: Option<BurnDuration>,
    /// Precisions of the products, one after another [default: what heats a GPU most;
    /// several at level extended]
    #[arg(long, value_name = "LIST", value_parser = crate::cli_values::precision(), value_delimiter = ',')]
    burn_precision: Vec<Precision>,
    /// GEMM implementation [default: auto]
    #[arg(long, value_name = "ENGINE", value_parser = crate::cli_values::engine())]
    burn_engine: Option<EngineChoice>,
    /// Memory that is filled with results, of what is free: 80%, 2GiB [default: 95%]
    #[arg(long, value_name = "SIZE", env = "GPU_VALIDATOR_BURN_MEMORY")]
    burn_memory: Option<BurnMemory>,
    /// Burn a GPU although other processes use it
    #[arg(long)]
    burn_share: bool,
    /// How long the workers of the allocation test work, at level extended
    #[arg(
        long,
        value_name = "TIME",
        default_value = ALLOCATION_DURATION,
        env = "GPU_VALIDATOR_ALLOCATION_DURATION",
        hide = true
    )]
    allocation_duration: BurnDuration,
    /// Memory of each of them
    #[arg(
        long,
        value_name = "SIZE",
        default_value = ALLOCATION_MEMORY,
        env = "GPU_VALIDATOR_ALLOCATION_MEMORY",
        hide = true
    )]
    allocation_memory: WorkerMemory,
}

/// Memory of a worker where none is given.
pub(super) const ALLOCATION_MEMORY: &str = "256MiB";
/// Of the allocation test in a run: with its other phases some 8 s, and the starts of processes, a
/// quarter of a second each.
const ALLOCATION_DURATION: &str = "4s";

impl BurnOfRun {
    /// The allocation test in addition to this burn, or the reason why there is none.
    pub(crate) fn allocation(
        &self,
        level: Level,
        burn: &Result<BurnOptions, String>,
    ) -> Result<AllocationOptions, String> {
        let burn = burn.as_ref().map_err(Clone::clone)?;
        if level < Level::Extended {
            return Err(format!("level {level} has no allocation test"));
        }
        let (duration, memory) = (self.allocation_duration.0, self.allocation_memory.0);
        Ok(AllocationOptions::lasting(duration, memory, burn.share))
    }

    /// What to burn, or why nothing is burned. An error is a burn that cannot end before the run is
    /// stopped.
    pub(crate) fn plan(
        &self,
        level: Level,
        profile: &Profile,
    ) -> anyhow::Result<Result<BurnOptions, String>> {
        let settings = profile.levels.get(&level).cloned().unwrap_or_default();
        if self.no_burn {
            return Ok(Err("--no-burn was given".to_owned()));
        }
        let Some(duration) = settings.burn.duration(level) else {
            return Ok(Err(if level < Level::Standard {
                format!("level {level} works no GPU")
            } else {
                format!("the profile turns it off for level {level}")
            }));
        };
        let duration = self.burn_duration.map_or(duration, |it| it.0);
        if let Some(deadline_s) = settings
            .deadline_s
            .filter(|it| *it <= duration.as_secs_f64())
        {
            bail!(
                "--burn-duration is {} s, and the profile lets a run of level {level} take {deadline_s} s",
                duration.as_secs_f64()
            );
        }
        let memory = settings.burn.memory_percent.map(MemoryShare::Percent);
        Ok(Ok(BurnOptions {
            precisions: if self.burn_precision.is_empty() {
                settings.burn.precisions(level)
            } else {
                self.burn_precision.clone()
            },
            memory: self
                .burn_memory
                .map(|it| it.0)
                .or(memory)
                .unwrap_or(MemoryShare::DEFAULT),
            engine: self
                .burn_engine
                .or(settings.burn.engine)
                .unwrap_or_default(),
            share: self.burn_share || settings.burn.share == Some(true),
            ..BurnOptions::lasting(duration)
        }))
    }
}

/// A time as `90s`, `5m`, `1h`; a number alone is seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BurnDuration(pub(super) Duration);

impl FromStr for BurnDuration {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, factor) = match text.char_indices().last() {
            Some((at, 's')) => (&text[..at], 1.0),
            Some((at, 'm')) => (&text[..at], 60.0),
            Some((at, 'h')) => (&text[..at], 3600.0),
            _ => (text, 1.0),
        };
        let seconds: f64 = number
            .parse()
            .map_err(|_| "a time is a number and s, m or h: 90s".to_owned())?;
        let seconds = seconds * factor;
        if !BURN_SECONDS.contains(&seconds) {
            return Err("a burn takes 0.1 s at least and a week at most".to_owned());
        }
        Ok(Self(Duration::from_secs_f64(seconds)))
    }
}

/// A share of the free memory, or bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct BurnMemory(pub(super) MemoryShare);

impl FromStr for BurnMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const UNITS: [(&str, u64); 3] = [("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];
        if let Some(percent) = text.strip_suffix('%') {
            return match percent.trim().parse::<f64>() {
                Ok(percent) if percent > 0.0 && percent <= 100.0 => {
                    Ok(Self(MemoryShare::Percent(percent)))
                }
                _ => Err("a share is more than 0% and at most 100%".to_owned()),
            };
        }
        for (unit, bytes) in UNITS {
            if let Some(number) = text.strip_suffix(unit) {
                let count: Option<u64> = number.trim().parse().ok();
                return count
                    .filter(|it| *it > 0)
                    .and_then(|it| it.checked_mul(bytes))
                    .map(|it| Self(MemoryShare::Bytes(it)))
                    .ok_or_else(|| format!("a size is a whole number and a unit: 2{unit}"));
            }
        }
        Err("memory is a share or a size: 80%, 2GiB".to_owned())
    }
}

/// Memory of a worker of the allocation test, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WorkerMemory(pub(super) u64);

impl FromStr for WorkerMemory {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<BurnMemory>()?.0 {
            MemoryShare::Bytes(bytes) => Ok(Self(bytes)),
            MemoryShare::Percent(_) => Err("the memory of a worker is a size: 256MiB".to_owned()),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "one digit is shown")]
pub(super) fn gibibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_read_with_their_unit() {
        let seconds = |text: &str| text.parse().map(|it: BurnDuration| it.0.as_secs_f64());
        assert_eq!(seconds("10s"), Ok(10.0));
        assert_eq!(seconds("1.5m"), Ok(90.0));
        assert_eq!(seconds("2"), Ok(2.0));
        for nonsense in ["", "s", "10d", "-1s", "0s", "NaN", "1e9h", "π"] {
            assert!(seconds(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn memory_is_a_share_or_a_size() {
        let memory = |text: &str| text.parse().map(|it: BurnMemory| it.0);
        assert_eq!(memory("80%"), Ok(MemoryShare::Percent(80.0)));
        assert_eq!(memory("2GiB"), Ok(MemoryShare::Bytes(2 << 30)));
        for nonsense in [
            "",
            "0%",
            "101%",
            "NaN%",
            "2GB",
            "0GiB",
            "99999999999GiB",
            "5",
        ] {
            assert!(memory(nonsense).is_err(), "{nonsense}");
        }
    }

    #[test]
    fn the_memory_of_a_worker_is_a_size() {
        let memory = |text: &str| text.parse::<WorkerMemory>().map(|it| it.0);
        assert_eq!(memory("1GiB"), Ok(1 << 30));
        assert!(memory("80%").is_err() && memory("1GB").is_err());
    }

    #[test]
    fn only_level_extended_tests_allocation_and_only_where_it_burns() {
        let options = nothing_said();
        let burn = Ok(BurnOptions::lasting(Duration::from_secs(1)));
        let planned = |level, burn: &_| options.allocation(level, burn);
        let whole = planned(Level::Extended, &burn).expect("a test");
        assert_eq!(whole.duration, Duration::from_secs(4));
        assert_eq!(whole.memory_bytes, 256 << 20);
        assert!(planned(Level::Standard, &burn).is_err());
        let off = Err("--no-burn was given".to_owned());
        assert!(planned(Level::Extended, &off).is_err());
    }

    fn plan(
        profile: &str,
        level: Level,
        options: &BurnOfRun,
    ) -> anyhow::Result<Result<BurnOptions, String>> {
        let profile = validator_core::parse_profile(profile, "p.yaml").expect("a profile");
        options.plan(level, &profile)
    }

    fn nothing_said() -> BurnOfRun {
        BurnOfRun {
            no_burn: false,
            burn_duration: None,
            burn_precision: Vec::new(),
            burn_engine: None,
            burn_memory: None,
            burn_share: false,
            allocation_duration: BurnDuration(Duration::from_secs(4)),
            allocation_memory: WorkerMemory(256 << 20),
        }
    }

    #[test]
    fn levels_burn_as_documented() {
        let of_level = |level| plan("{}", level, &nothing_said()).expect("a plan");
        let quick = of_level(Level::Quick);
        assert_eq!(quick, Err("level quick works no GPU".to_owned()));
        let standard = BurnOptions::lasting(Duration::from_secs(10));
        assert_eq!(of_level(Level::Standard), Ok(standard));
        let extended = of_level(Level::Extended).expect("it burns");
        assert_eq!(extended.duration, Duration::from_mins(1));
        assert_eq!(extended.precisions.len(), 5);
    }

    #[test]
    fn the_profile_changes_the_level_and_the_command_line_both() {
        let profile = "levels: {standard: {burn: {duration_s: 30, precisions: [fp64], memory_percent: 50, engine: ptx, share: true}}}";
        let burn = |options: &BurnOfRun| plan(profile, Level::Standard, options).expect("a plan");
        let expected = BurnOptions {
            precisions: vec![Precision::Fp64],
            memory: MemoryShare::Percent(50.0),
            engine: EngineChoice::Ptx,
            share: true,
            ..BurnOptions::lasting(Duration::from_secs(30))
        };
        assert_eq!(burn(&nothing_said()), Ok(expected));
        let said = BurnOfRun {
            burn_duration: Some(BurnDuration(Duration::from_secs(1))),
            burn_precision: vec![Precision::Bf16],
            burn_engine: Some(EngineChoice::Cublaslt),
            burn_memory: Some(BurnMemory(MemoryShare::Bytes(1 << 20))),
            ..nothing_said()
        };
        let expected = BurnOptions {
            precisions: vec![Precision::Bf16],
            memory: MemoryShare::Bytes(1 << 20),
            engine: EngineChoice::Cublaslt,
            share: true,
            ..BurnOptions::lasting(Duration::from_secs(1))
        };
        assert_eq!(burn(&said), Ok(expected));
    }

    #[test]
    fn a_burn_can_be_turned_off() {
        let off = "levels: {standard: {burn: {enabled: false}}}";
        let planned = plan(off, Level::Standard, &nothing_said()).expect("a plan");
        assert_eq!(
            planned,
            Err("the profile turns it off for level standard".to_owned())
        );
        let said = BurnOfRun {
            no_burn: true,
            ..nothing_said()
        };
        let planned = plan("{}", Level::Extended, &said).expect("a plan");
        assert_eq!(planned, Err("--no-burn was given".to_owned()));
    }

    #[test]
    fn a_burn_longer_than_the_run_is_refused() {
        let profile = "levels: {standard: {deadline_s: 20}}";
        let said = BurnOfRun {
            burn_duration: Some(BurnDuration(Duration::from_secs(20))),
            ..nothing_said()
        };
        let error = plan(profile, Level::Standard, &said).expect_err("too long");
        assert_eq!(
            error.to_string(),
            "--burn-duration is 20 s, and the profile lets a run of level standard take 20 s"
        );
        assert!(plan(profile, Level::Standard, &nothing_said()).is_ok());
    }
}
