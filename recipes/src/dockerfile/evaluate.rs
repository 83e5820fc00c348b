//! One stage, instruction by instruction: what each does to the files and to the configuration.

use std::collections::BTreeSet;

use crate::RecipeError;
use crate::error::Location;
use crate::glob::clean;
use crate::plan::{
    Action, Chmod, Copy, CopyFrom, CopySource, Healthcheck, ImageConfig, InlineFile, Network, Run,
    Step, Warning,
};

use super::expand::Lexer;
use super::flags::{Flags, duration};
use super::lower::LowerOptions;
use super::mount::{MountScope, mount};
use super::parse::{Arguments, Dockerfile, Heredoc, Instruction, exec_array, raw_words};
use super::scope::{Variables, proxy_environment};

/// Arguments that steer the build itself and never become a variable of a step.
const NOT_IN_ENVIRONMENT: [&str; 3] =
    ["SOURCE_DATE_EPOCH", "BUILDKIT_SBOM_SCAN_CONTEXT", "BUILDKIT_SBOM_SCAN_STAGE"];

pub(super) type Find<'a> = dyn FnMut(&str, &Location) -> Result<CopyFrom, RecipeError> + 'a;

/// A stage being evaluated.
pub(super) struct Evaluator<'a> {
    pub dockerfile: &'a Dockerfile,
    pub options: &'a LowerOptions,
    pub globals: &'a Variables,
    /// What `$name` means and what `RUN` sees.
    pub variables: Variables,
    /// Names of `ARG`s so far, for the history.
    pub declared: Vec<String>,
    pub config: ImageConfig,
    pub author: Option<String>,
    pub steps: Vec<Step>,
    /// `CMD` was set in this stage, so that `ENTRYPOINT` leaves it.
    pub cmd_set: bool,
    pub warnings: &'a mut Vec<Warning>,
    pub used_args: &'a mut BTreeSet<String>,
    pub find: &'a mut Find<'a>,
}

/// `NAME` or `NAME=value` words of an `ARG`, values raw.
pub(super) fn stage_words(
    instruction: &Instruction,
    escape: char,
) -> Result<Vec<(String, Option<String>)>, RecipeError> {
    let at = &instruction.at;
    Flags::read(at, instruction.keyword, &instruction.flags, &[])?;
    let text = text_of(instruction);
    let words = raw_words(&text, escape);
    if words.is_empty() {
        return Err(at.error("ARG without a name", "write ARG name or ARG name=default"));
    }
    words
        .into_iter()
        .map(|word| {
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (word, None),
            };
            if name.is_empty() {
                return Err(at.error("ARG with an empty name", "write ARG name=default"));
            }
            Ok((name, value))
        })
        .collect()
}

/// The value an `ARG` takes: passed, its default, or (in a stage) the global one.
pub(super) fn apply_arg(
    instruction: &Instruction,
    dockerfile: &Dockerfile,
    name: &str,
    default: Option<String>,
    known: &Variables,
    options: &LowerOptions,
    globals: Option<&Variables>,
) -> Result<Option<String>, RecipeError> {
    if let Some(passed) = options.build_args.get(name) {
        return Ok(Some(passed.clone()));
    }
    match default {
        Some(default) => {
            let lookup = |name: &str| known.get(name).map(str::to_owned);
            let expansion = Lexer::new(dockerfile.escape).word(&default, &lookup).map_err(|e| {
                instruction.at.error(format!("ARG {name}={default}: {e}"), "correct the default")
            })?;
            Ok(Some(expansion.text))
        }
        None => Ok(globals.and_then(|globals| globals.get(name)).map(str::to_owned)),
    }
}

fn text_of(instruction: &Instruction) -> String {
    match &instruction.arguments {
        Arguments::Text(text) => text.clone(),
        Arguments::Json(words) => words.join(" "),
    }
}

/// A path of a step: absolute and clean, relative ones below `working_dir`, a trailing slash kept.
pub(super) fn absolute(working_dir: &str, path: &str) -> String {
    let directory = path.is_empty() || path == "." || path.ends_with('/') || path.ends_with("/.");
    let base = if working_dir.is_empty() { "/" } else { working_dir };
    let mut out =
        clean(&if path.starts_with('/') { path.to_owned() } else { format!("{base}/{path}") });
    if directory && out != "/" {
        out.push('/');
    }
    out
}

impl Evaluator<'_> {
    /// Takes over the environment of the base.
    pub fn inherit(&mut self) {
        for line in &self.config.env {
            let (name, value) = line.split_once('=').unwrap_or((line, ""));
            self.variables.set(name, value);
        }
    }

    fn expand(&mut self, at: &Location, keyword: &str, text: &str) -> Result<String, RecipeError> {
        Ok(self.expansion(at, keyword, text, Lexer::new(self.dockerfile.escape))?.text)
    }

    fn expansion(
        &mut self,
        at: &Location,
        keyword: &str,
        text: &str,
        lexer: Lexer,
    ) -> Result<super::expand::Expansion, RecipeError> {
        let variables = &self.variables;
        let lookup = |name: &str| variables.get(name).map(str::to_owned);
        let expansion = lexer.word(text, &lookup).map_err(|error| {
            let hint = if error.contains("quote is not closed") && "COPYADDVOLUME".contains(keyword)
            {
                format!("for names with spaces write {keyword} [\"…\", \"…\"]")
            } else {
                "correct the expression, or escape a literal $ or quote".to_owned()
            };
            at.error(format!("{keyword} {text}: {error}"), hint)
        })?;
        for unset in &expansion.unset {
            self.warn(
                at,
                format!("${unset} has no value here and expands to nothing in {keyword}"),
            );
        }
        Ok(expansion)
    }

    fn warn(&mut self, at: &Location, message: String) {
        self.warnings.push(Warning { at: at.clone(), message });
    }

    fn push(&mut self, instruction: &Instruction, created_by: String, action: Action) {
        let mut text = instruction.text.clone();
        if let Some(heredoc) = instruction.heredocs.first() {
            let first = heredoc.content.trim().lines().next().unwrap_or_default().to_owned();
            text.push_str(&format!(" ({first}…)"));
        }
        self.steps.push(Step { at: instruction.at.clone(), text, created_by, action });
    }

    fn configure(&mut self, instruction: &Instruction, created_by: String) {
        self.push(instruction, created_by, Action::Configure);
    }

    fn shell(&self) -> Vec<String> {
        self.config.shell.clone().unwrap_or_else(|| vec!["/bin/sh".into(), "-c".into()])
    }

    /// Applies one instruction.
    pub fn instruction(&mut self, instruction: &Instruction) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let keyword = instruction.keyword;
        if !matches!(keyword, "ADD" | "COPY" | "RUN" | "HEALTHCHECK" | "FROM") {
            Flags::read(at, keyword, &instruction.flags, &[])?;
        }
        let text = text_of(instruction);
        if text.is_empty() && matches!(&instruction.arguments, Arguments::Text(_)) {
            return Err(at.error(
                format!("{keyword} without anything after it"),
                match keyword {
                    "CMD" | "ENTRYPOINT" => format!("write {keyword} [] to clear it"),
                    _ => "complete or remove the line".to_owned(),
                },
            ));
        }
        match keyword {
            "RUN" => self.run(instruction),
            "COPY" | "ADD" => self.copy(instruction),
            "ENV" | "LABEL" => self.pairs(instruction, &text),
            "ARG" => self.arg(instruction),
            "WORKDIR" => {
                let path = self.expand(at, keyword, &text)?;
                if path.is_empty() {
                    return Err(
                        at.error(format!("WORKDIR {text} expands to nothing"), "name a directory")
                    );
                }
                let path = absolute(&self.config.working_dir, &path);
                let path = if path == "/" { path } else { path.trim_end_matches('/').to_owned() };
                self.config.working_dir.clone_from(&path);
                let action = match path.as_str() {
                    "/" => Action::Configure,
                    _ => {
                        Action::MakeDirectory { path: path.clone(), user: self.config.user.clone() }
                    }
                };
                self.push(instruction, format!("WORKDIR {path}"), action);
                Ok(())
            }
            "USER" => {
                let user = self.expand(at, keyword, &text)?;
                self.config.user.clone_from(&user);
                self.configure(instruction, format!("USER {user}"));
                Ok(())
            }
            "CMD" => {
                let args = self.command(&instruction.arguments);
                self.configure(instruction, format!("CMD {args:?}"));
                self.config.cmd = Some(args);
                self.cmd_set = true;
                Ok(())
            }
            "ENTRYPOINT" => {
                let args = self.command(&instruction.arguments);
                self.configure(instruction, format!("ENTRYPOINT {args:?}"));
                self.config.entrypoint = Some(args).filter(|args| !args.is_empty());
                if !self.cmd_set {
                    self.config.cmd = None;
                }
                Ok(())
            }
            "EXPOSE" => self.expose(instruction, &text),
            "VOLUME" => self.volume(instruction),
            "STOPSIGNAL" => {
                let signal = self.expand(at, keyword, &text)?;
                if !is_signal(&signal) {
                    return Err(at.error(
                        format!("{signal:?} is no signal"),
                        "write a name such as SIGTERM or a number from 1 to 64",
                    ));
                }
                self.configure(instruction, format!("STOPSIGNAL {signal}"));
                self.config.stop_signal = Some(signal);
                Ok(())
            }
            "SHELL" => {
                let Arguments::Json(shell) = &instruction.arguments else {
                    return Err(
                        at.error("SHELL takes a JSON array", "write SHELL [\"/bin/bash\", \"-c\"]")
                    );
                };
                if shell.is_empty() {
                    return Err(at.error("SHELL [] is empty", "name a program and its arguments"));
                }
                self.configure(instruction, format!("SHELL {shell:?}"));
                self.config.shell = Some(shell.clone());
                Ok(())
            }
            "HEALTHCHECK" => self.healthcheck(instruction, &text),
            "MAINTAINER" => {
                self.warn(at, "MAINTAINER is deprecated; write LABEL maintainer=…".to_owned());
                self.configure(instruction, format!("MAINTAINER {text}"));
                self.author = Some(text);
                Ok(())
            }
            _ => Err(at.error(
                format!("{keyword} is not supported"),
                "write the instruction itself in the Dockerfile that builds on this image",
            )),
        }
    }

    fn command(&self, arguments: &Arguments) -> Vec<String> {
        match arguments {
            Arguments::Json(args) => args.clone(),
            Arguments::Text(line) => {
                let mut args = self.shell();
                args.push(line.clone());
                args
            }
        }
    }

    fn arg(&mut self, instruction: &Instruction) -> Result<(), RecipeError> {
        let mut shown = Vec::new();
        for (name, default) in stage_words(instruction, self.dockerfile.escape)? {
            let value = apply_arg(
                instruction,
                self.dockerfile,
                &name,
                default,
                &self.variables,
                self.options,
                Some(self.globals),
            )?;
            self.used_args.insert(name.clone());
            shown.push(match &value {
                Some(value) => format!("{name}={value}"),
                None => name.clone(),
            });
            if let Some(value) = value
                && !NOT_IN_ENVIRONMENT.contains(&name.as_str())
            {
                self.variables.set(&name, &value);
            }
            if !self.declared.contains(&name) {
                self.declared.push(name);
            }
        }
        self.configure(instruction, format!("ARG {}", shown.join(" ")));
        Ok(())
    }

    /// `ENV` and `LABEL`: `name=value …`, or the old `name value`.
    fn pairs(&mut self, instruction: &Instruction, text: &str) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let keyword = instruction.keyword;
        let words = raw_words(text, self.dockerfile.escape);
        let mut pairs = Vec::new();
        if words.first().is_some_and(|word| !word.contains('=')) {
            let Some((name, value)) = text.split_once(char::is_whitespace) else {
                return Err(at.error(
                    format!("{keyword} {text} has no value"),
                    format!("write {keyword} {text}=VALUE"),
                ));
            };
            pairs.push((name.to_owned(), value.trim_start().to_owned()));
        } else {
            for word in words {
                let Some((name, value)) = word.split_once('=') else {
                    return Err(at.error(
                        format!("{keyword}: {word:?} has no '='"),
                        "write name=value; quote values that hold spaces",
                    ));
                };
                pairs.push((name.to_owned(), value.to_owned()));
            }
        }
        // All values see the variables as they were before the instruction.
        let mut expanded = Vec::new();
        for (name, value) in pairs {
            let name = self.expand(at, keyword, &name)?;
            if name.is_empty() {
                return Err(at.error(format!("{keyword} with an empty name"), "name it"));
            }
            expanded.push((name, self.expand(at, keyword, &value)?));
        }
        let shown: Vec<String> = expanded.iter().map(|(n, v)| format!("{n}={v}")).collect();
        for (name, value) in expanded {
            if keyword == "LABEL" {
                self.config.labels.insert(name, value);
                continue;
            }
            self.variables.set(&name, &value);
            let mut env = Variables::from_lines(&self.config.env);
            env.set(&name, &value);
            self.config.env = env.lines();
        }
        self.configure(instruction, format!("{keyword} {}", shown.join(" ")));
        Ok(())
    }

    fn expose(&mut self, instruction: &Instruction, text: &str) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let lexer = Lexer::new(self.dockerfile.escape);
        for word in self.expansion(at, "EXPOSE", text, lexer)?.words {
            let bad = || {
                at.error(
                    format!("EXPOSE {word}: not a port"),
                    "write PORT, PORT/udp or FIRST-LAST; publishing is decided when a sandbox runs",
                )
            };
            let (ports, protocol) = word.split_once('/').unwrap_or((&word, "tcp"));
            let protocol = protocol.to_lowercase();
            if !["tcp", "udp", "sctp"].contains(&protocol.as_str()) {
                return Err(bad());
            }
            let (first, last) = ports.split_once('-').unwrap_or((ports, ports));
            let (first, last): (u16, u16) = match (first.parse(), last.parse()) {
                (Ok(first), Ok(last)) if first <= last && first > 0 => (first, last),
                _ => return Err(bad()),
            };
            self.config
                .exposed_ports
                .extend((first..=last).map(|port| format!("{port}/{protocol}")));
        }
        self.configure(instruction, format!("EXPOSE {text}"));
        Ok(())
    }

    fn volume(&mut self, instruction: &Instruction) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let words: Vec<String> = match &instruction.arguments {
            Arguments::Json(words) => words.clone(),
            Arguments::Text(text) => text.split_whitespace().map(str::to_owned).collect(),
        };
        for word in words {
            let path = self.expand(at, "VOLUME", &word)?;
            if path.is_empty() {
                return Err(at.error(format!("VOLUME {word} expands to nothing"), "name a path"));
            }
            self.config.volumes.insert(path);
        }
        let shown: Vec<&String> = self.config.volumes.iter().collect();
        self.configure(instruction, format!("VOLUME {shown:?}"));
        Ok(())
    }

    fn healthcheck(&mut self, instruction: &Instruction, text: &str) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let known = ["interval=", "timeout=", "start-period=", "start-interval=", "retries="];
        let flags = Flags::read(at, "HEALTHCHECK", &instruction.flags, &known)?;
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        let rest = rest.trim();
        let mut check = Healthcheck::default();
        match word.to_ascii_uppercase().as_str() {
            "NONE" if rest.is_empty() && instruction.flags.is_empty() => {
                check.test = vec!["NONE".to_owned()];
            }
            "NONE" => {
                return Err(at.error("HEALTHCHECK NONE takes nothing else", "remove the rest"));
            }
            "CMD" if rest.is_empty() => {
                return Err(at.error("HEALTHCHECK CMD without a command", "write the command"));
            }
            "CMD" => {
                check.test = match exec_array(rest) {
                    Some(args) if args.is_empty() => {
                        return Err(
                            at.error("HEALTHCHECK CMD [] is empty", "write the command in it")
                        );
                    }
                    Some(args) => std::iter::once("CMD".to_owned()).chain(args).collect(),
                    None => vec!["CMD-SHELL".to_owned(), rest.to_owned()],
                };
                let time = |name: &str| match flags.get(name) {
                    None => Ok(0),
                    Some(text) => match duration(text) {
                        Some(0) => Ok(0),
                        Some(nanos) if nanos >= 1_000_000 => Ok(nanos),
                        _ => Err(at.error(
                            format!("--{name}={text} is no duration of at least 1ms"),
                            "write e.g. 30s or 1m30s",
                        )),
                    },
                };
                check.interval = time("interval")?;
                check.timeout = time("timeout")?;
                check.start_period = time("start-period")?;
                check.start_interval = time("start-interval")?;
                check.retries = match flags.get("retries") {
                    None => 0,
                    Some(text) => text.parse::<u32>().map(u64::from).map_err(|_| {
                        at.error(format!("--retries={text} is no number"), "write e.g. 3")
                    })?,
                };
            }
            _ => {
                return Err(at.error(
                    format!("HEALTHCHECK {word} is unknown"),
                    "write HEALTHCHECK CMD … or HEALTHCHECK NONE",
                ));
            }
        }
        self.configure(instruction, format!("HEALTHCHECK {:?}", check.test));
        self.config.healthcheck = Some(check);
        Ok(())
    }

    fn run(&mut self, instruction: &Instruction) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let known = ["mount*=", "network=", "security=", "device*="];
        let flags = Flags::read(at, "RUN", &instruction.flags, &known)?;
        match flags.get("security") {
            None | Some("sandbox") => {}
            Some(other) => {
                return Err(at.error(
                    format!("RUN --security={other} is not supported"),
                    "remove it; steps never get the host's privileges",
                ));
            }
        }
        if flags.all("device").next().is_some() {
            return Err(at.error(
                "RUN --device is not supported",
                "remove it; steps get no devices of the host",
            ));
        }
        let network = match flags.get("network") {
            None | Some("default") => Network::Default,
            Some("none") => Network::None,
            Some("host") => Network::Host,
            Some(other) => {
                return Err(at.error(
                    format!("RUN --network={other} is unknown"),
                    "write default, none or host",
                ));
            }
        };
        let mut script = None;
        let args = match (&instruction.arguments, instruction.heredocs.as_slice()) {
            (Arguments::Json(args), _) if args.is_empty() => {
                return Err(at.error("RUN [] is empty", "write the program and its arguments"));
            }
            (Arguments::Json(args), _) => args.clone(),
            (Arguments::Text(line), []) => self.with_shell(line.clone()),
            (Arguments::Text(line), [first, ..]) if Heredoc::opener(line).is_some() => {
                let data = first.text();
                if data.starts_with("#!") {
                    let path = format!("/dev/pipes/{}", first.name);
                    script = Some(InlineFile { name: path.clone(), data });
                    self.with_shell(path)
                } else {
                    self.with_shell(data)
                }
            }
            (Arguments::Text(line), heredocs) => {
                let mut full = line.clone();
                for heredoc in heredocs {
                    full.push('\n');
                    full.push_str(&heredoc.content);
                    full.push_str(&heredoc.name);
                }
                self.with_shell(full)
            }
        };
        let mut mounts = Vec::new();
        let mut ssh = 0;
        for text in flags.all("mount") {
            let variables = self.variables.clone();
            let lexer = Lexer::new(self.dockerfile.escape);
            let working_dir = self.config.working_dir.clone();
            let mut expand = |text: &str| {
                let lookup = |name: &str| variables.get(name).map(str::to_owned);
                lexer.word(text, &lookup).map(|expansion| expansion.text).map_err(|error| {
                    at.error(format!("--mount: {text}: {error}"), "correct the expression")
                })
            };
            let find = &mut self.find;
            let mut from = |name: &str| find(name, at);
            let mut scope = MountScope {
                at,
                working_dir: if working_dir.is_empty() { "/" } else { &working_dir },
                expand: &mut expand,
                from: &mut from,
            };
            let mount = mount(text, &mut scope, ssh)?;
            ssh += usize::from(matches!(mount.source, crate::plan::MountSource::Ssh { .. }));
            mounts.push(mount);
        }
        let arguments: Vec<String> = self
            .declared
            .iter()
            .map(|name| format!("{name}={}", self.variables.get(name).unwrap_or_default()))
            .collect();
        let mut created_by = "RUN ".to_owned();
        if !arguments.is_empty() {
            created_by.push_str(&format!("|{} {} ", arguments.len(), arguments.join(" ")));
        }
        created_by.push_str(&args.join(" "));
        let run = Run {
            args,
            env: self.variables.lines(),
            uncached_env: proxy_environment(&self.options.build_args),
            working_dir: match self.config.working_dir.as_str() {
                "" => "/".to_owned(),
                path => path.to_owned(),
            },
            user: self.config.user.clone(),
            mounts,
            network,
            script,
        };
        self.push(instruction, created_by, Action::Run(Box::new(run)));
        Ok(())
    }

    fn with_shell(&self, line: String) -> Vec<String> {
        let mut args = self.shell();
        args.push(line);
        args
    }

    fn copy(&mut self, instruction: &Instruction) -> Result<(), RecipeError> {
        let at = &instruction.at;
        let keyword = instruction.keyword;
        let add = keyword == "ADD";
        let known: &[&str] = if add {
            &["chown=", "chmod=", "link", "keep-git-dir", "checksum=", "unpack", "exclude*="]
        } else {
            &["from=", "chown=", "chmod=", "link", "parents", "exclude*="]
        };
        let flags = Flags::read(at, keyword, &instruction.flags, known)?;
        let words: Vec<String> = match &instruction.arguments {
            Arguments::Json(words) => words.clone(),
            Arguments::Text(text) => text.split_whitespace().map(str::to_owned).collect(),
        };
        let [raw_sources @ .., raw_dest] = words.as_slice() else {
            return Err(
                at.error(format!("{keyword} without sources"), "name source and destination")
            );
        };
        if raw_sources.is_empty() {
            return Err(at.error(
                format!("{keyword} has no destination"),
                format!("write {keyword} {raw_dest} /destination"),
            ));
        }
        if Heredoc::opener(raw_dest).is_some() && !instruction.heredocs.is_empty() {
            return Err(at.error(
                format!("{keyword}: the destination is a here-document"),
                "put the destination last",
            ));
        }
        let mut sources = Vec::new();
        let mut inline = Vec::new();
        for word in raw_sources {
            let opened = Heredoc::opener(word)
                .and_then(|open| instruction.heredocs.iter().find(|doc| doc.name == open.name));
            if let Some(heredoc) = opened {
                let mut data = heredoc.text();
                if heredoc.expand {
                    let mut lexer = Lexer::new('\\');
                    lexer.ignore_quotes = true;
                    data = self.expansion(at, keyword, &data, lexer)?.text;
                }
                inline.push(CopySource::Inline(InlineFile { name: heredoc.name.clone(), data }));
                continue;
            }
            let path = self.expand(at, keyword, word)?;
            sources.push(self.source(instruction, &flags, path)?);
        }
        let checksum = flags.get("checksum").is_some();
        if checksum && !matches!(sources.as_slice(), [CopySource::Url { .. }]) {
            return Err(at.error(
                "ADD --checksum needs exactly one http(s) source",
                "split the line, one ADD per download",
            ));
        }
        if flags.switch("keep-git-dir")?.is_some() {
            return Err(at.error(
                "ADD --keep-git-dir is for git sources, which are not supported",
                "clone in a RUN step, or add the repository to the build context",
            ));
        }
        sources.extend(inline);
        let dest = self.expand(at, keyword, raw_dest)?;
        let dest = absolute(&self.config.working_dir, &dest);
        let from = match flags.get("from") {
            None => CopyFrom::Context,
            Some(name) => (self.find)(name, at)?,
        };
        let chown = match flags.get("chown") {
            None => None,
            Some(text) => Some(self.expand(at, keyword, text)?).filter(|text| !text.is_empty()),
        };
        let chmod = match flags.get("chmod") {
            None => None,
            Some(text) => {
                let text = self.expand(at, keyword, text)?;
                Some(chmod(&text).ok_or_else(|| {
                    at.error(
                        format!("{keyword} --chmod={text} is no mode"),
                        "write octal digits up to 7777 or symbols such as u=rwX,go=rX",
                    )
                })?)
            }
        };
        let mut exclude = Vec::new();
        for pattern in flags.all("exclude") {
            let pattern = self.expand(at, keyword, pattern)?;
            crate::glob::PatternSet::new(&[&pattern]).map_err(|error| {
                at.error(format!("{keyword} --exclude: {error}"), "close or escape its brackets")
            })?;
            exclude.push(pattern);
        }
        let link = flags.switch("link")?.unwrap_or(false);
        let parents = !add && flags.switch("parents")?.unwrap_or(false);
        let unpack = match add {
            false => false,
            true => {
                let remote = sources.iter().any(|s| matches!(s, CopySource::Url { .. }));
                flags.switch("unpack")?.unwrap_or(!remote)
            }
        };
        let mut created_by = keyword.to_owned();
        for (name, value) in [("chown", &chown)] {
            if let Some(value) = value {
                created_by.push_str(&format!(" --{name}={value}"));
            }
        }
        for source in &sources {
            created_by.push_str(&match source {
                CopySource::Path { path } => format!(" {path}"),
                CopySource::Inline(file) => format!(" <<{}", file.name),
                CopySource::Url { url, .. } => format!(" {url}"),
            });
        }
        created_by.push_str(&format!(" {dest}"));
        let copy = Copy { from, sources, dest, chown, chmod, link, parents, exclude, unpack };
        self.push(instruction, created_by, Action::Copy(Box::new(copy)));
        Ok(())
    }

    fn source(
        &mut self,
        instruction: &Instruction,
        flags: &Flags<'_>,
        path: String,
    ) -> Result<CopySource, RecipeError> {
        let at = &instruction.at;
        let keyword = instruction.keyword;
        let is_http = path.starts_with("http://") || path.starts_with("https://");
        let before_fragment = path.split(['#', '?']).next().unwrap_or(&path);
        let is_git = path.starts_with("git://")
            || path.starts_with("ssh://")
            || path.starts_with("git@")
            || (is_http && before_fragment.ends_with(".git"));
        if is_git {
            return Err(at.error(
                format!("{keyword} {path}: git sources are not supported"),
                "clone in a RUN step (--mount=type=ssh for keys), or add it to the build context",
            ));
        }
        if !is_http {
            if path.is_empty() {
                return Err(at.error(
                    format!("a source of {keyword} expands to nothing"),
                    "give its variable a value, or write . for the whole context",
                ));
            }
            let inside = clean(&path);
            if flags.get("from").is_none() && (inside == ".." || inside.starts_with("../")) {
                return Err(at.error(
                    format!("{keyword} {path} leaves the build context"),
                    "build from a directory above it, or pass --build-context name=DIR and copy --from=name",
                ));
            }
            crate::glob::Glob::new(&path).map_err(|error| {
                at.error(format!("{keyword}: {error}"), "close its brackets or escape them with \\")
            })?;
            return Ok(CopySource::Path { path });
        }
        if keyword == "COPY" {
            return Err(at.error(format!("COPY {path}: an address"), "write ADD for downloads"));
        }
        let checksum = match flags.get("checksum") {
            None => None,
            Some(text) => {
                let text = self.expand(at, keyword, text)?;
                let hex = text.strip_prefix("sha256:").unwrap_or_default();
                if hex.len() != 64 || !hex.bytes().all(|b| b.is_ascii_hexdigit()) {
                    return Err(at.error(
                        format!("ADD --checksum={text} is no SHA-256"),
                        "write sha256: and 64 hexadecimal digits",
                    ));
                }
                Some(text.to_lowercase())
            }
        };
        let after_host = path.splitn(4, '/').nth(3).unwrap_or_default();
        let name = after_host.split(['#', '?']).next().unwrap_or_default();
        let name = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
        let name = if name.is_empty() { "__unnamed__" } else { name }.to_owned();
        Ok(CopySource::Url { url: path, checksum, name })
    }
}

fn chmod(text: &str) -> Option<Chmod> {
    if !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()) {
        return u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o7777).map(Chmod::Octal);
    }
    let good = !text.is_empty()
        && text.split(',').all(|clause| {
            let rest = clause.trim_start_matches(['u', 'g', 'o', 'a']);
            let mut operators = 0;
            let known = rest.chars().all(|c| {
                operators += usize::from("+-=".contains(c));
                "+-=rwxXstugo".contains(c)
            });
            known && operators > 0 && rest.starts_with(['+', '-', '='])
        });
    good.then(|| Chmod::Symbolic(text.to_owned()))
}

fn is_signal(text: &str) -> bool {
    if let Ok(number) = text.parse::<u32>() {
        return (1..=64).contains(&number);
    }
    let upper = text.to_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    let real_time = |prefix: &str| {
        name.strip_prefix(prefix).is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n <= 15))
    };
    const NAMES: [&str; 36] = [
        "ABRT", "ALRM", "BUS", "CHLD", "CLD", "CONT", "FPE", "HUP", "ILL", "INT", "IO", "IOT",
        "KILL", "PIPE", "POLL", "PROF", "PWR", "QUIT", "SEGV", "STKFLT", "STOP", "SYS", "TERM",
        "TRAP", "TSTP", "TTIN", "TTOU", "URG", "USR1", "USR2", "VTALRM", "WINCH", "XCPU", "XFSZ",
        "RTMIN", "RTMAX",
    ];
    NAMES.contains(&name) || real_time("RTMIN+") || real_time("RTMAX-")
}
