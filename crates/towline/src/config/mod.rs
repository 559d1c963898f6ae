//! One meaning for a flag, a variable and a key of the file: the flag wins, then the variable, then the file, then
//! the default.
//!
//! Nothing is listed here. The command line of `cli.rs` is walked: each argument gets its variable
//! (`TOWLINE_<SUBCOMMAND>_<FLAG>`), and each key of the file becomes the default of the argument of that name, so
//! that clap settles which one wins and checks every value alike. A key is in its subcommand's table (`[bench.kv]` for
//! one within another); what all subcommands take stands at the top:
//!
//! ```toml
//! log = "info"
//! [worker]
//! threads = 4
//! ```

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::ValueParser;
use clap::error::ErrorKind;
use clap::{Arg, ArgAction, ArgMatches, Command, CommandFactory, FromArgMatches};
use toml::{Table, Value};

use crate::cli::Cli;

/// The file that is read when none is named.
const DEFAULT_FILE: &str = "towline.toml";
/// The argument that names the file, which no file can hold.
const CONFIG: &str = "config";

/// What was asked, settled.
pub(crate) struct Invocation {
    pub(crate) cli: Cli,
    /// The subcommand's matches: where a value came from, and how to hand it on.
    pub(crate) matches: ArgMatches,
}

/// The command line with its variables, as `--help` and `docs/cli.md` show it.
pub(crate) fn command() -> Command {
    with_variables(Cli::command(), "TOWLINE")
}

fn with_variables(command: Command, prefix: &str) -> Command {
    let command = command.mut_args(|arg| with_variable(arg, prefix));
    let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
    names.into_iter().fold(command, |command, name| {
        let prefix = format!("{prefix}_{}", name.to_uppercase());
        command.mut_subcommand(name, |sub| with_variables(sub, &prefix))
    })
}

fn with_variable(arg: Arg, prefix: &str) -> Arg {
    let Some(flag) = arg.get_long() else { return arg };
    let name = format!("{prefix}_{}", flag.replace('-', "_").to_uppercase());
    arg.env(name).hide_env_values(true)
}

/// Reads flags, variables and the file.
///
/// # Errors
/// A [`clap::Error`] (which may be a request for help), or what is wrong with the file.
pub(crate) fn parse(args: Vec<OsString>) -> Result<Invocation> {
    let mut command = command();
    if let Some(file) = file_of(&command, &args)? {
        command = with_file(command, &file)?;
    }
    let mut matches = command.try_get_matches_from(args)?;
    let cli = Cli::from_arg_matches(&matches)?;
    let (_, matches) = matches.remove_subcommand().context("no subcommand")?;
    Ok(Invocation { cli, matches })
}

/// Which file to read: the one named by flag or variable, or the default one where it exists.
fn file_of(command: &Command, args: &[OsString]) -> Result<Option<PathBuf>> {
    let named = match command.clone().ignore_errors(true).try_get_matches_from(args) {
        Ok(matches) => matches.get_one::<PathBuf>(CONFIG).cloned(),
        Err(asked) if matches!(asked.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion) => {
            return Err(asked.into());
        }
        Err(_) => None, // the second, strict pass says what is wrong
    };
    Ok(named.or_else(|| Path::new(DEFAULT_FILE).is_file().then(|| DEFAULT_FILE.into())))
}

fn with_file(command: Command, file: &Path) -> Result<Command> {
    let text = std::fs::read_to_string(file)
        .with_context(|| format!("can't read the configuration file {}", file.display()))?;
    with_text(command, &text).with_context(|| format!("in the configuration file {}", file.display()))
}

/// Makes each key of a TOML text the default of its argument.
fn with_text(command: Command, text: &str) -> Result<Command> {
    let table: Table = text.parse().map_err(|error: toml::de::Error| anyhow!("not TOML: {error}"))?;
    let root = command.clone();
    with_table(command, "", table, &root)
}

/// The keys of one table; a table within it is that of a subcommand.
fn with_table(mut command: Command, section: &str, table: Table, root: &Command) -> Result<Command> {
    for (key, value) in table {
        command = match value {
            Value::Table(inner) if command.find_subcommand(&key).is_some() => {
                let sub = command.find_subcommand(&key).context("no such table")?.clone();
                let changed = with_table(sub, &dotted(section, &key), inner, root)?;
                command.mut_subcommand(&key, |_| changed)
            }
            value => with_key(command.clone(), section, &key, &value)
                .map_err(|error| elsewhere((root, &command), section, &key).unwrap_or(error))?,
        };
    }
    Ok(command)
}

fn with_key(command: Command, section: &str, key: &str, value: &Value) -> Result<Command> {
    let Some(arg) = command.get_arguments().find(|arg| arg.get_long() == Some(key) && key != CONFIG) else {
        bail!(unknown(&command, section, key));
    };
    let values = texts(arg, value)
        .and_then(|values| check(arg, &values).map(|()| values))
        .with_context(|| format!("key {}", dotted(section, key)))?;
    let id = arg.get_id().clone();
    Ok(command.mut_arg(id, |arg| arg.required(false).default_values(values)))
}

/// A key of another table under this one's name, which is a likelier slip than a misspelling.
fn elsewhere((root, here): (&Command, &Command), section: &str, key: &str) -> Option<anyhow::Error> {
    let known = |command: &Command| command.get_arguments().any(|arg| arg.get_long() == Some(key));
    (!known(here) && known(root)).then(|| {
        anyhow!(
            "unknown key {}: {key:?} stands at the top of the file, before any table",
            dotted(section, key)
        )
    })
}

fn unknown(command: &Command, section: &str, key: &str) -> String {
    let tables = command.get_subcommands().map(Command::get_name);
    let flags = command.get_arguments().filter_map(Arg::get_long).filter(|flag| *flag != CONFIG);
    let near = flags
        .chain(tables)
        .map(|known| (strsim::damerau_levenshtein(known, key), known))
        .min()
        .filter(|(distance, known)| *distance <= known.len().div_ceil(2));
    let owners = owners(command, section, key);
    let hint = match near {
        _ if !owners.is_empty() => format!("; it belongs in {}", owners.join(" or ")),
        Some((_, known)) => format!("; the nearest known key is {:?}", dotted(section, known)),
        None => String::new(),
    };
    format!("unknown key {}{hint}", dotted(section, key))
}

/// The tables within this one that have the key.
fn owners(command: &Command, section: &str, key: &str) -> Vec<String> {
    let of_sub = |sub: &Command| {
        let name = dotted(section, sub.get_name());
        let has = sub.get_arguments().any(|arg| arg.get_long() == Some(key));
        let mut found: Vec<String> = has.then(|| format!("[{name}]")).into_iter().collect();
        found.extend(owners(sub, &name, key));
        found
    };
    command.get_subcommands().flat_map(of_sub).collect()
}

fn dotted(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_owned() } else { format!("{section}.{key}") }
}

/// The value as the words that would stand on a command line.
fn texts(arg: &Arg, value: &Value) -> Result<Vec<String>> {
    let takes_bool = arg.get_value_parser().type_id() == ValueParser::bool().type_id();
    match value {
        Value::Array(items) if matches!(arg.get_action(), ArgAction::Append) => {
            items.iter().map(|item| text(item, takes_bool)).collect()
        }
        value => Ok(vec![text(value, takes_bool)?]),
    }
}

fn text(value: &Value, takes_bool: bool) -> Result<String> {
    match value {
        Value::Boolean(value) if takes_bool => Ok(value.to_string()),
        _ if takes_bool => bail!("expected true or false, found {}", value.type_str()),
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        other => bail!("expected a text or a number, found {}", other.type_str()),
    }
}

/// Lets clap read the values by the argument's own parser, on a command line with nothing else.
fn check(arg: &Arg, values: &[String]) -> Result<()> {
    let flag = arg.get_long().context("not a flag")?;
    let words = values.iter().map(|value| format!("--{flag}={value}"));
    let lone = Command::new("towline").no_binary_name(true).arg(arg.clone().required(false).global(false));
    match lone.try_get_matches_from(words) {
        Ok(_) => Ok(()),
        Err(error) => {
            let text = error.to_string();
            let first = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
            let possible =
                text.lines().find(|line| line.contains("[possible values:")).unwrap_or_default().trim();
            Err(anyhow!("{}", format!("{first} {possible}").trim_end()))
        }
    }
}

#[cfg(test)]
mod tests;
