// SPDX-License-Identifier: Apache-2.0
#include "flags.hpp"

#include <CLI/CLI.hpp>
#include <iostream>
#include <sstream>

#include "command.hpp"

namespace flamia::cli {

void Command::file(const std::string& name, std::string* value, const std::string& help) {
  app_->add_option(name, *value, help)->required();
}

void Command::text(const std::string& name, std::string* value, const std::string& shown, const std::string& help) {
  // an empty variable of a script must not read as a flag that was not given
  const auto given = [](const std::string& text) { return text.empty() ? "has no value; give one or leave the flag out" : ""; };
  app_->add_option(name, *value, help)->check(given, "")->option_text(shown);
}

void Command::required_text(const std::string& name, std::string* value, const std::string& shown, const std::string& help) {
  app_->add_option(name, *value, help)->required()->option_text(shown);
}

void Command::choice(const std::string& name, const std::vector<std::string>& words, const std::string& shown,
                     const std::string& help, const std::function<void(const std::string&)>& chosen) {
  app_->add_option_function<std::string>(name, chosen, help)->check(CLI::IsMember(words))->option_text(shown);
}

void Command::choice(const std::string& name, const std::vector<std::string>& words, const std::string& shown,
                     const std::string& help, std::string* value) {
  choice(name, words, shown, help, [value](const std::string& word) { *value = word; });
}

void Command::whole(const std::string& name, int* value, int least, int most, const std::string& shown, const std::string& help) {
  app_->add_option(name, *value, help)->check(CLI::Range(least, most))->option_text(shown);
}

void Command::whole(const std::string& name, std::int64_t* value, std::int64_t least, std::int64_t most, const std::string& shown,
                    const std::string& help) {
  app_->add_option(name, *value, help)->check(CLI::Range(least, most))->option_text(shown);
}

void Command::seed(const std::string& name, std::uint32_t* value, const std::string& help) {
  app_->add_option(name, *value, help)->option_text("N");
}

void Command::seed(const std::string& name, std::uint64_t* value, const std::string& help) {
  app_->add_option(name, *value, help)->option_text("N");
}

void Command::number(const std::string& name, std::optional<double>* value, const std::string& shown, const std::string& help) {
  app_->add_option_function<double>(
          name, [value](const double& given) { *value = given; }, help)
      ->option_text(shown);
}

void Command::flag(const std::string& name, bool* value, const std::string& help) { app_->add_flag(name, *value, help); }

void Command::exclude(const std::string& name, const std::string& other) {
  app_->get_option(name)->excludes(app_->get_option(other));
}

void Command::footer(const std::string& text) { app_->footer(text); }

void Command::action(std::function<Status()> action) {
  app_->callback([session = session_, action = std::move(action)] { session->action = action; });
}

Program::Program(const std::string& description, const std::string& footer)
    : app_(std::make_unique<CLI::App>(description, "flamia")) {
  app_->set_version_flag("--version", version());
  app_->require_subcommand(1);
  app_->footer(footer);
  app_->failure_message([](const CLI::App*, const CLI::Error& error) {
    return "flamia: error: " + printable(error.what()) + "; see flamia --help or flamia COMMAND --help\n";
  });
}

Program::~Program() = default;

Command Program::command(const std::string& name, const std::string& help) { return {app_->add_subcommand(name, help), &session_}; }

std::optional<int> Program::parse(int argc, char** argv) {
  // CLI11 would say only that a command is missing
  std::string names;
  bool known = argc < 2 || argv[1][0] == '-';
  for (const CLI::App* command : app_->get_subcommands({})) {
    names += (names.empty() ? "" : ", ") + command->get_name();
    known = known || command->get_name() == argv[1];
  }
  if (!known) {
    std::cerr << "flamia: error: there is no command \"" + printable(argv[1]) + "\"; there are " + names + "\n";
    return kBadInput;
  }
  try {
    app_->parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::ostringstream text;  // of --help and --version
    if (app_->exit(error, text, std::cerr) != 0) return kBadInput;
    const Status printed = print(text.str());
    if (!printed.ok()) std::cerr << "flamia: error: " << printable(printed.message()) << "\n";
    return exit_code(printed.code());
  }
  return {};
}

}  // namespace flamia::cli
