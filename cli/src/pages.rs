//! Manual pages and completions of shells, from the definitions that the help is
//! printed from. For packagers: `palingenesis generate DIR`, and so the worker, which
//! shares this file. Must hold no text of its own about what a program does.

use std::fs;
use std::io;
use std::path::Path;

use clap::Command;
use clap_complete::Shell;
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

/// `palingenesis generate DIR`. No subcommand: completions offer hidden ones too.
pub const WORD: &str = "generate";

/// A page about something that is no program.
#[derive(Debug)]
pub struct Page<'a> {
    /// `palingenesis.toml`.
    pub name: &'a str,
    /// Of the manual.
    pub section: &'a str,
    /// One line, for whatis(1).
    pub about: &'a str,
    /// How it is given.
    pub synopsis: &'a str,
    /// As it is shown elsewhere, line by line.
    pub text: &'a str,
    /// `palingenesis(1)` and the like.
    pub see: &'a str,
}

/// Writes `folder`/man/man1/… and `folder`/completions/… for a program and its
/// subcommands; `section` is that of the program's own page.
///
/// # Errors
/// A file that cannot be written.
pub fn program(command: Command, section: &str, see: &str, folder: &Path) -> io::Result<()> {
    let shells = folder.join("completions");
    fs::create_dir_all(&shells)?;
    let name = command.get_name().to_string();
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        let file = clap_complete::generate_to(shell, &mut command.clone(), &name, &shells)?;
        if shell == Shell::Bash {
            // clap_complete 4.6 takes a dash in the program's name for a subcommand there, and
            // then looks for what it never sets.
            let (wrong, right) = (name.replace('-', "__subcmd__"), name.replace('-', "__"));
            let text = fs::read_to_string(&file)?.replace(&format!("{wrong}__subcmd__"), &format!("{right}__subcmd__"));
            fs::write(&file, text)?;
        }
    }
    // Of `help` there is no page.
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let mut related = vec![see.to_string()];
    let parts: Vec<Command> = command.get_subcommands().filter(|part| !part.is_hide_set()).cloned().collect();
    for part in &parts {
        let name = format!("{}-{}", command.get_name(), part.get_name());
        related.push(format!("{name}({section})"));
        let part = part.clone().name(name).version(command.get_version().unwrap_or_default().to_string());
        man(part, section, &format!("{}({section}), {see}", command.get_name()), folder)?;
    }
    man(command, section, &related.join(", "), folder)
}

/// One page of a program.
fn man(command: Command, section: &str, see: &str, folder: &Path) -> io::Result<()> {
    let name = command.get_name().to_string();
    // Its own lines are kept: they are lists and examples, which a paragraph would join.
    let after = command.get_after_long_help().or(command.get_after_help()).map(|text| text.to_string());
    let subcommands = command.get_subcommands().any(|part| !part.is_hide_set());
    let page = Man::new(command.after_help("").after_long_help("")).section(section).manual("palingenesis");
    let mut text = Vec::new();
    page.render_title(&mut text)?;
    page.render_name_section(&mut text)?;
    page.render_synopsis_section(&mut text)?;
    page.render_description_section(&mut text)?;
    page.render_options_section(&mut text)?;
    if subcommands {
        page.render_subcommands_section(&mut text)?;
    }
    if let Some(after) = after {
        lines("NOTES", &after).to_writer(&mut text)?;
    }
    see_also(see).to_writer(&mut text)?;
    write(folder, &name, section, &text)
}

/// A page that shows a text line by line.
///
/// # Errors
/// As [`program`].
pub fn page(page: &Page, folder: &Path) -> io::Result<()> {
    let mut roff = Roff::new();
    let version = concat!("palingenesis ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", [page.name, page.section, "", version, "palingenesis"]);
    roff.control("SH", ["NAME"]).text([roman(format!("{} - {}", page.name, page.about))]);
    roff.control("SH", ["SYNOPSIS"]).text([bold(page.synopsis)]);
    let mut text = Vec::new();
    roff.to_writer(&mut text)?;
    lines("DESCRIPTION", page.text).to_writer(&mut text)?;
    see_also(page.see).to_writer(&mut text)?;
    write(folder, page.name, page.section, &text)
}

/// Each line by itself, not justified; one that is too long for the screen is broken.
fn lines(title: &str, text: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", [title]).control("ad", ["l"]).control("nh", []);
    for line in text.lines() {
        match line.trim() {
            "" => roff.control("sp", []),
            _ => roff.control("br", []).text([roman(line)]),
        };
    }
    roff.control("hy", []).control("ad", ["b"]);
    roff
}

fn see_also(pages: &str) -> Roff {
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]).text([roman(pages)]);
    roff
}

fn write(folder: &Path, name: &str, section: &str, text: &[u8]) -> io::Result<()> {
    let folder = folder.join(format!("man/man{section}"));
    fs::create_dir_all(&folder)?;
    fs::write(folder.join(format!("{name}.{section}")), text)
}
