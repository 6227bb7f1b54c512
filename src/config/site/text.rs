//! What a site file means, as text for people.

use std::fmt::Write;

use super::{Section, Site, SiteProfile, SiteVariable, SiteView};
use crate::config::nics::NicPattern;
use crate::config::printable;
use crate::facts::User;
use crate::report::is_secret;

impl Site {
    /// Every section with its settings and variables, ending in a newline.
    pub fn text(&self) -> String {
        let mut text = format!("site file {}\n", self.file);
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  log = {}", self.log.name());
        if self.top.is_empty() {
            text.push_str("  no default for all jobs\n");
        } else {
            text.push_str("  for all jobs\n");
            self.top.write(&mut text);
        }
        for (kind, list) in [("partition", &self.partitions), ("node", &self.nodes)] {
            for selected in list {
                let _ = writeln!(text, "  for {kind} {}", printable(selected.pattern.text()));
                selected.section.write(&mut text);
            }
        }
        for (name, profile) in &self.profiles {
            write_profile(&mut text, name, profile);
        }
        text
    }

    /// What holds in the end for one partition and node, ending in a newline.
    pub fn view_text(&self, partition: Option<&str>, node: Option<&str>, user: &User) -> String {
        let view: SiteView = self.view(partition, node, user);
        let or = |name: Option<&str>| name.map_or("not given".to_string(), printable);
        let mut text = format!("together, for partition {} and node {}\n", or(partition), or(node));
        let settings = &view.settings;
        for (key, value) in settings.values() {
            let _ = writeln!(text, "    {key} = {}", printable(&value));
        }
        for (word, on) in
            [("show", settings.show), ("debug", settings.debug), ("deterministic", settings.deterministic)]
        {
            if on {
                let _ = writeln!(text, "    {word}");
            }
        }
        write_cards(&mut text, "nic-allow", view.nics.allow.as_deref());
        write_cards(&mut text, "nic-deny", Some(view.nics.deny.as_slice()).filter(|list| !list.is_empty()));
        write_variables(&mut text, &view.env);
        text
    }
}

impl Section {
    fn is_empty(&self) -> bool {
        let no_cards = self.nic_allow.is_none() && self.nic_deny.is_none();
        self.words.is_empty() && self.env.is_empty() && self.settings.values().is_empty() && no_cards
    }

    fn write(&self, text: &mut String) {
        for (key, value) in self.settings.values() {
            let _ = writeln!(text, "    {key} = {}", printable(&value));
        }
        for (word, on) in &self.words {
            let _ = writeln!(text, "    {word} = {on}");
        }
        write_cards(text, "nic-allow", self.nic_allow.as_deref());
        write_cards(text, "nic-deny", self.nic_deny.as_deref());
        write_variables(text, &self.env);
    }
}

fn write_cards(text: &mut String, key: &str, list: Option<&[NicPattern]>) {
    if let Some(list) = list {
        let list: Vec<String> = list.iter().map(|pattern| format!("\"{pattern}\"")).collect();
        let _ = writeln!(text, "    {key} = [{}]", list.join(", "));
    }
}

fn write_profile(text: &mut String, name: &str, profile: &SiteProfile) {
    let words = [("debug", profile.debug), ("deterministic", profile.deterministic)];
    let words: String = words.iter().filter(|(_, on)| *on).map(|(word, _)| format!(", {word}")).collect();
    let _ = writeln!(text, "  profile {name}, on top of {}{words}", profile.base.name());
    write_variables(text, &profile.env);
}

fn write_variables(text: &mut String, variables: &[SiteVariable]) {
    for variable in variables {
        let SiteVariable { name, value, force, place, .. } = variable;
        let value = if is_secret(name) { "(hidden)".into() } else { printable(value) };
        let how = if *force { "force: above the user's own" } else { "default: below the user's own" };
        let line = place.rsplit(':').next().unwrap_or_default();
        let _ = writeln!(text, "    {name}={value}  ({how}; line {line})");
    }
}
