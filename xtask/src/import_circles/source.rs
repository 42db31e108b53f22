//! Modules of a crate and their imports, read from the source alone: nothing is compiled, so a
//! crate that does not build yet has imports too. Tokens are read, not syntax trees: a path inside
//! a macro's arguments counts like any other.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow, ensure};
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// Where a module is, from the crate's root: `["facts", "gpu"]`.
pub(super) type ModulePath = Vec<String>;

/// The modules of one crate outside tests.
#[derive(Debug, Default)]
pub(super) struct Crate {
    /// The files' paths are relative to it.
    root: PathBuf,
    modules: BTreeMap<ModulePath, Module>,
}

#[derive(Debug, Default)]
struct Module {
    file: PathBuf,
    /// Names of types, functions and so on that are defined here.
    items: BTreeSet<String>,
    /// What `use` gives a name here.
    names: BTreeMap<String, Vec<String>>,
    globs: Vec<Vec<String>>,
    paths: Vec<NamedPath>,
}

/// A path as it is written, `["super", "gpu", "Gpu"]`.
#[derive(Debug)]
struct NamedPath {
    segments: Vec<String>,
    line: usize,
}

/// One module names another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Import {
    pub(super) from: ModulePath,
    pub(super) to: ModulePath,
    pub(super) file: PathBuf,
    pub(super) line: usize,
}

/// Re-exports of re-exports, after which a path is given up as one that names itself.
const MOST_HOPS: usize = 16;

impl Crate {
    /// Reads `file` (`src/lib.rs`) below `root`, and all modules of it.
    pub(super) fn read(root: &Path, file: &Path) -> anyhow::Result<Crate> {
        let mut modules = Crate {
            root: root.to_path_buf(),
            ..Crate::default()
        };
        let folder = file.parent().unwrap_or(Path::new(""));
        modules.read_file(&Vec::new(), file, folder)?;
        Ok(modules)
    }

    pub(super) fn len(&self) -> usize {
        self.modules.len()
    }

    /// `folder` is where the files of the module's children lie.
    fn read_file(&mut self, path: &ModulePath, file: &Path, folder: &Path) -> anyhow::Result<()> {
        let text = std::fs::read_to_string(self.root.join(file))
            .with_context(|| file.display().to_string())?;
        let tokens: TokenStream = text.parse().map_err(|error: proc_macro2::LexError| {
            let line = error.span().start().line;
            anyhow!("{}:{line}: {error}", file.display())
        })?;
        self.read_module(path, file, folder, tokens)
    }

    fn read_module(
        &mut self,
        path: &ModulePath,
        file: &Path,
        folder: &Path,
        tokens: TokenStream,
    ) -> anyhow::Result<()> {
        let mut module = Module {
            file: file.to_path_buf(),
            ..Module::default()
        };
        let mut children = Vec::new();
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        module.read_tokens(&tokens, Some(&mut children));
        let previous = self.modules.insert(path.clone(), module);
        ensure!(previous.is_none(), "{} is declared twice", path.join("::"));
        for child in children {
            let child_path = [&path[..], std::slice::from_ref(&child.name)].concat();
            let child_folder = folder.join(&child.name);
            if let Some(body) = child.body {
                self.read_module(&child_path, file, &child_folder, body)?;
                continue;
            }
            let candidates = if let Some(given) = &child.file {
                vec![file.parent().unwrap_or(Path::new("")).join(given)]
            } else {
                vec![
                    folder.join(format!("{}.rs", child.name)),
                    child_folder.join("mod.rs"),
                ]
            };
            let found = candidates
                .iter()
                .find(|it| self.root.join(it).is_file())
                .with_context(|| {
                    format!("{}: module `{}` has no file", file.display(), child.name)
                })?;
            let is_mod_rs = found.file_name().is_some_and(|name| name == "mod.rs");
            let below = match found.parent() {
                Some(parent) if is_mod_rs => parent.to_path_buf(),
                Some(parent) => parent.join(found.file_stem().unwrap_or_default()),
                None => child_folder,
            };
            self.read_file(&child_path, found, &below)?;
        }
        Ok(())
    }

    /// All imports between different modules.
    pub(super) fn imports(&self) -> Vec<Import> {
        let mut imports = BTreeSet::new();
        for (from, module) in &self.modules {
            for NamedPath { segments, line } in &module.paths {
                let to = self.resolve(from, segments, MOST_HOPS);
                imports.extend(to.filter(|to| to != from).map(|to| Import {
                    from: from.clone(),
                    to,
                    file: module.file.clone(),
                    line: *line,
                }));
            }
        }
        imports.into_iter().collect()
    }

    /// The module that `segments` name in module `from`.
    ///
    /// What a module re-exports is the module's own, as the source has it, but for the module
    /// itself and those around it: what they re-export to their children is followed, because a
    /// child and its parent have no tie.
    fn resolve(&self, from: &[String], segments: &[String], hops: usize) -> Option<ModulePath> {
        let (first, rest) = segments.split_first().filter(|_| hops > 0)?;
        let mut at = from.to_vec();
        let mut rest = rest;
        match &**first {
            "crate" => at.clear(),
            "self" => {}
            "super" => {
                at.pop();
            }
            _ => rest = segments,
        }
        while let Some((next, behind)) = rest.split_first() {
            if next == "super" {
                at.pop();
            } else if next != "self" {
                let child = [&at[..], std::slice::from_ref(next)].concat();
                if !self.modules.contains_key(&child) {
                    break;
                }
                at = child;
            }
            rest = behind;
        }
        let Some((name, behind)) = rest.split_first() else {
            return Some(at);
        };
        let module = self.modules.get(&at)?;
        let is_around = from.starts_with(&at);
        if let Some(path) = module.names.get(name).filter(|_| is_around) {
            return self.resolve(&at, &[&path[..], behind].concat(), hops - 1);
        }
        if is_around && !module.items.contains(name) {
            let of_glob = module.globs.iter().find_map(|glob| {
                let target = self.resolve(&at, glob, hops - 1)?;
                self.has(&target, name).then_some(target)
            });
            if of_glob.is_some() {
                return of_glob;
            }
            // A plain name that nothing here defines is another crate's.
            if rest.len() == segments.len() {
                return None;
            }
        }
        Some(at)
    }

    fn has(&self, target: &[String], name: &str) -> bool {
        let child = [target, &[name.to_owned()]].concat();
        self.modules.contains_key(&child)
            || self.modules.get(target).is_some_and(|module| {
                module.items.contains(name) || module.names.contains_key(name)
            })
    }
}

/// `mod name;` or `mod name { … }`.
struct Child {
    name: String,
    /// Of `#[path = "…"]`.
    file: Option<String>,
    body: Option<TokenStream>,
}

impl Module {
    /// Reads a sequence of tokens; of a module's own, with the list of its `children`.
    fn read_tokens(&mut self, tokens: &[TokenTree], mut children: Option<&mut Vec<Child>>) {
        let mut at = 0;
        let mut file_of_next = None;
        while at < tokens.len() {
            if let Some(attribute) = attribute(&tokens[at..]) {
                at += 2;
                match attribute {
                    Attribute::TestOnly => at = after_item(tokens, at),
                    Attribute::Path(file) => file_of_next = Some(file),
                    Attribute::Other => {}
                }
                continue;
            }
            let word = ident(&tokens[at]).unwrap_or_default();
            let name = tokens.get(at + 1).and_then(ident);
            match (&*word, name, children.as_deref_mut()) {
                ("use", _, _) => {
                    let end = position(tokens, at, |it| is_punct(it, ';'));
                    self.read_use(&tokens[at + 1..end]);
                    at = end + 1;
                }
                ("mod", Some(name), Some(children)) => {
                    let body = match tokens.get(at + 2) {
                        Some(TokenTree::Group(group)) => Some(group.stream()),
                        _ => None,
                    };
                    children.push(Child {
                        name,
                        file: file_of_next.take(),
                        body,
                    });
                    at += 3;
                }
                (
                    "struct" | "enum" | "union" | "trait" | "type" | "fn" | "const" | "static",
                    Some(name),
                    Some(_),
                ) => {
                    self.items.insert(name);
                    at += 1;
                }
                _ => at = self.read_other(tokens, at),
            }
        }
    }

    /// A path, a group or any one token.
    fn read_other(&mut self, tokens: &[TokenTree], at: usize) -> usize {
        if let TokenTree::Group(group) = &tokens[at] {
            let inner: Vec<TokenTree> = group.stream().into_iter().collect();
            self.read_tokens(&inner, None);
            return at + 1;
        }
        let Some(first) = ident(&tokens[at]) else {
            return at + 1;
        };
        let line = tokens[at].span().start().line;
        // `a.b::<T>()` and `::other_crate` name nothing here.
        let is_continued = at > 0
            && (is_punct(&tokens[at - 1], ':') && at > 1 && is_punct(&tokens[at - 2], ':')
                || is_punct(&tokens[at - 1], '.'));
        let mut segments = vec![first];
        let mut next = at + 1;
        while let Some(segment) = after_colons(tokens, next).and_then(|it| ident(&tokens[it])) {
            segments.push(segment);
            next += 3;
        }
        if segments.len() > 1 && !is_continued {
            self.paths.push(NamedPath { segments, line });
        }
        next
    }

    fn read_use(&mut self, tree: &[TokenTree]) {
        self.read_use_tree(&[], tree);
    }

    /// `a::b::{c, d as e, f::*}`, after `prefix`.
    fn read_use_tree(&mut self, prefix: &[String], tree: &[TokenTree]) {
        let mut path = prefix.to_vec();
        let mut at = 0;
        // `::name` is another crate.
        if tree.first().is_some_and(|it| is_punct(it, ':')) {
            return;
        }
        while let Some(token) = tree.get(at) {
            let line = token.span().start().line;
            match token {
                TokenTree::Group(group) => {
                    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                    for part in inner.split(|it| is_punct(it, ',')) {
                        self.read_use_tree(&path, part);
                    }
                    return;
                }
                TokenTree::Punct(punct) if punct.as_char() == '*' => {
                    self.paths.push(NamedPath {
                        segments: path.clone(),
                        line,
                    });
                    self.globs.push(path);
                    return;
                }
                TokenTree::Ident(word) if word == "as" => {
                    let alias = tree.get(at + 1).and_then(ident).unwrap_or_default();
                    self.bind(alias, path, line);
                    return;
                }
                TokenTree::Ident(word) => path.push(word.to_string()),
                _ => {}
            }
            at += 1;
        }
        if let (Some(last), Some(token)) = (path.last().cloned(), tree.first()) {
            let line = token.span().start().line;
            // `use a::{self}` binds `a`.
            let name = match (&*last, path.len()) {
                ("self", 2..) => path[path.len() - 2].clone(),
                _ => last,
            };
            self.bind(name, path, line);
        }
    }

    fn bind(&mut self, name: String, path: Vec<String>, line: usize) {
        self.paths.push(NamedPath {
            segments: path.clone(),
            line,
        });
        // A name that is bound to itself would be resolved without end, and is another crate's.
        if path.len() > 1 || path.first() != Some(&name) {
            self.names.insert(name, path);
        }
    }
}

enum Attribute {
    TestOnly,
    Path(String),
    Other,
}

/// `#[…]` at the start of `tokens`.
fn attribute(tokens: &[TokenTree]) -> Option<Attribute> {
    let [hash, TokenTree::Group(group), ..] = tokens else {
        return None;
    };
    if !is_punct(hash, '#') || group.delimiter() != Delimiter::Bracket {
        return None;
    }
    let inner: Vec<TokenTree> = group.stream().into_iter().collect();
    Some(match &inner[..] {
        [word, TokenTree::Group(condition)] if ident(word).is_some_and(|it| it == "cfg") => {
            let condition = words(condition.stream());
            let has = |word: &str| condition.iter().any(|it| it == word);
            if has("test") && !has("not") && !has("any") {
                Attribute::TestOnly
            } else {
                Attribute::Other
            }
        }
        [word, equals, TokenTree::Literal(file)]
            if ident(word).is_some_and(|it| it == "path") && is_punct(equals, '=') =>
        {
            Attribute::Path(file.to_string().trim_matches('"').to_owned())
        }
        _ => Attribute::Other,
    })
}

fn words(tokens: TokenStream) -> Vec<String> {
    let mut all = Vec::new();
    for token in tokens {
        match token {
            TokenTree::Ident(word) => all.push(word.to_string()),
            TokenTree::Group(group) => all.extend(words(group.stream())),
            _ => {}
        }
    }
    all
}

/// The position after the item, the field or the statement that begins at `at`.
fn after_item(tokens: &[TokenTree], mut at: usize) -> usize {
    while attribute(tokens.get(at..).unwrap_or_default()).is_some() {
        at += 2;
    }
    let keywords = tokens[at.min(tokens.len())..].iter().map_while(ident);
    let has_value = keywords
        .take(4)
        .any(|word| matches!(&*word, "const" | "static" | "use" | "type" | "let"))
        && !tokens[at..]
            .iter()
            .take(4)
            .filter_map(ident)
            .any(|word| word == "fn");
    while let Some(token) = tokens.get(at) {
        at += 1;
        let is_body = matches!(token, TokenTree::Group(it) if it.delimiter() == Delimiter::Brace);
        if is_punct(token, ';') || is_punct(token, ',') || is_body && !has_value {
            break;
        }
    }
    at
}

/// The position after `::` at `at`, where there is one.
fn after_colons(tokens: &[TokenTree], at: usize) -> Option<usize> {
    let are_colons = tokens.get(at).is_some_and(|it| is_punct(it, ':'))
        && tokens.get(at + 1).is_some_and(|it| is_punct(it, ':'));
    (are_colons && at + 2 < tokens.len()).then_some(at + 2)
}

fn position(tokens: &[TokenTree], from: usize, is_it: impl Fn(&TokenTree) -> bool) -> usize {
    let found = tokens[from..].iter().position(is_it);
    found.map_or(tokens.len(), |it| from + it)
}

fn ident(token: &TokenTree) -> Option<String> {
    match token {
        TokenTree::Ident(ident) => Some(ident.to_string()),
        _ => None,
    }
}

fn is_punct(token: &TokenTree, character: char) -> bool {
    matches!(token, TokenTree::Punct(punct) if punct.as_char() == character)
}
