//! Ties between sibling modules, and the circles that they make.
//!
//! Each level of the tree of modules is a graph of its own: `facts::gpu` that names `findings` is a
//! tie from `facts` to `findings`, and `facts::gpu` that names `facts::reading` is one from `gpu`
//! to `reading` inside `facts`. A module and its own children are one unit: a parent declares and
//! re-exports them, and they use its types.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::source::{Import, ModulePath};

/// From one module to a sibling, with an import for each.
#[derive(Debug, Default)]
pub(super) struct Ties {
    ties: BTreeMap<ModulePath, BTreeMap<ModulePath, Import>>,
}

/// The ties of a circle, each beginning where the one before it ends.
pub(super) type Circle<'t> = Vec<Tie<'t>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Tie<'t> {
    pub(super) from: &'t ModulePath,
    pub(super) to: &'t ModulePath,
    pub(super) import: &'t Import,
}

impl Ties {
    pub(super) fn of(imports: Vec<Import>) -> Ties {
        let mut all = Ties::default();
        for import in imports {
            let pairs = import.from.iter().zip(&import.to);
            let shared = pairs.take_while(|(one, other)| one == other).count();
            if shared == import.from.len() || shared == import.to.len() {
                continue;
            }
            let from = import.from[..=shared].to_vec();
            let to = import.to[..=shared].to_vec();
            all.ties
                .entry(from)
                .or_default()
                .entry(to)
                .or_insert(import);
        }
        all
    }

    /// Every tie that is part of a circle, with the shortest circle that it is part of.
    pub(super) fn circles(&self) -> BTreeMap<Tie<'_>, Circle<'_>> {
        let ties = self
            .ties
            .iter()
            .flat_map(|(from, to)| to.iter().map(move |(to, import)| Tie { from, to, import }));
        ties.filter_map(|tie| {
            let mut circle = vec![tie];
            circle.extend(self.way(tie.to, tie.from)?);
            Some((tie, circle))
        })
        .collect()
    }

    /// The shortest way.
    fn way<'t>(&'t self, from: &'t ModulePath, to: &ModulePath) -> Option<Vec<Tie<'t>>> {
        let mut queue = VecDeque::from([(from, Vec::new())]);
        let mut seen = BTreeSet::from([from]);
        while let Some((at, way)) = queue.pop_front() {
            if at == to {
                return Some(way);
            }
            for (next, import) in self.ties.get(at).into_iter().flatten() {
                if seen.insert(next) {
                    let tie = Tie {
                        from: at,
                        to: next,
                        import,
                    };
                    queue.push_back((next, [&way[..], &[tie]].concat()));
                }
            }
        }
        None
    }
}
