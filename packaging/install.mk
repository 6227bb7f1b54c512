# make install and make packages. Included by ../Makefile.
#
#   make install  [DESTDIR=…] [PREFIX=/usr] [LIBDIR=…] [NO_BUILD=1]
#   make packages [SLURM="22.05 24.11"]     .deb and .rpm, see packaging/build-packages
#   make deb, make rpm                      one kind of them
#
# Nothing is put where Slurm reads it: the admin enables the plugin, by
# palingenesis-enable or as the installed palingenesis.conf explains.
.PHONY: install install-strip install-plugin install-common install-development uninstall packages deb rpm

PREFIX ?= /usr
# Debian's library directory, else lib64 where there is one, else lib.
LIBDIR ?= $(PREFIX)/$(shell dpkg-architecture -qDEB_HOST_MULTIARCH 2>/dev/null | sed 's|^|lib/|' | grep . || \
	{ [ -e /usr/lib64/libc.so.6 ] && echo lib64 || echo lib; })
DOCDIR ?= $(PREFIX)/share/doc/palingenesis
# Where zsh looks: Debian has a directory of its own for packages.
ZSHDIR ?= $(PREFIX)/share/zsh/$(if $(wildcard /etc/debian_version),vendor-completions,site-functions)
INSTALL ?= install
# Elsewhere the plugin would not look for the worker.
WORKER_ARGUMENT = $(if $(filter /usr /usr/local,$(PREFIX)),, worker=$(PREFIX)/bin/palingenesis-worker)
# As README.md links to them.
DOCUMENTS = docs etc/examples examples
DOCUMENTED = etc/palingenesis.toml etc/worker.toml
BUILT = $(or $(CARGO_TARGET_DIR),target)/release
VERSION = $(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -n 1)
PAGES = $(DESTDIR)$(PREFIX)/share/palingenesis/.generated

install: install-plugin install-common
	$(MAKE) --no-print-directory install-development LIBRARY=link NO_BUILD=1

# Files that Slurm opens appear by renaming: a job that starts meanwhile sees the
# old one or the new one. The library before the line that names it.
install-plugin:
	$(if $(NO_BUILD),,cargo build --release --workspace)
	$(INSTALL) -d $(DESTDIR)$(LIBDIR)/palingenesis $(DESTDIR)$(PREFIX)/share/palingenesis
	$(INSTALL) -m 0644 $(or $(PLUGIN),$(BUILT)/libpalingenesis.so) \
		$(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so.new
	mv $(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so.new \
		$(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so
	sed 's|@LIBDIR@|$(LIBDIR)|; s|/usr/share/|$(PREFIX)/share/|; s|^optional .*|&$(WORKER_ARGUMENT)|' \
		etc/palingenesis.conf \
		>$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new
	chmod 0644 $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new
	mv $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf.new \
		$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf

install-common:
	$(if $(NO_BUILD),,cargo build --release --workspace)
	$(INSTALL) -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/sbin $(DESTDIR)$(PREFIX)/share/palingenesis \
		$(DESTDIR)$(DOCDIR)
	$(INSTALL) -m 0755 $(BUILT)/palingenesis $(BUILT)/palingenesis-worker $(DESTDIR)$(PREFIX)/bin
	ln -sfn ../bin/palingenesis $(DESTDIR)$(PREFIX)/sbin/palingenesis-enable
	$(INSTALL) -m 0644 etc/palingenesis.toml $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.toml.example
	rm -rf $(PAGES)
	$(BUILT)/palingenesis generate $(PAGES)
	$(BUILT)/palingenesis-worker generate $(PAGES)
	for section in $$(ls $(PAGES)/man); do \
		$(INSTALL) -d $(DESTDIR)$(PREFIX)/share/man/$$section && \
		$(INSTALL) -m 0644 $(PAGES)/man/$$section/* $(DESTDIR)$(PREFIX)/share/man/$$section || exit; \
	done
	$(INSTALL) -d $(DESTDIR)$(PREFIX)/share/bash-completion/completions $(DESTDIR)$(ZSHDIR) \
		$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	for file in $(PAGES)/completions/*.bash; do \
		$(INSTALL) -m 0644 $$file \
			$(DESTDIR)$(PREFIX)/share/bash-completion/completions/$$(basename $$file .bash) || exit; \
	done
	$(INSTALL) -m 0644 $(PAGES)/completions/_* $(DESTDIR)$(ZSHDIR)
	$(INSTALL) -m 0644 $(PAGES)/completions/*.fish $(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d
	rm -rf $(PAGES)
	$(INSTALL) -m 0644 LICENSE README.md $(DESTDIR)$(DOCDIR)
	for folder in $(DOCUMENTS); do \
		$(INSTALL) -d $(DESTDIR)$(DOCDIR)/$$folder && \
		$(INSTALL) -m 0644 $$folder/*.* $(DESTDIR)$(DOCDIR)/$$folder || exit; \
	done
	$(INSTALL) -m 0644 $(DOCUMENTED) $(DESTDIR)$(DOCDIR)/etc
	packaging/third-party >$(DESTDIR)$(DOCDIR)/THIRD-PARTY
	chmod 0644 $(DESTDIR)$(DOCDIR)/THIRD-PARTY

# The library under the name that -lpalingenesis and ctypes look for: the plugin's own
# file, or one by itself, for hosts that have no plugin.
install-development:
	$(if $(NO_BUILD),,cargo build --release)
	$(INSTALL) -d $(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(PREFIX)/include
	$(if $(filter link,$(LIBRARY)),ln -sfn palingenesis/spank_palingenesis.so $(DESTDIR)$(LIBDIR)/libpalingenesis.so.0,\
		$(INSTALL) -m $(or $(LIBRARY_MODE),0644) $(BUILT)/libpalingenesis.so $(DESTDIR)$(LIBDIR)/libpalingenesis.so.0)
	ln -sfn libpalingenesis.so.0 $(DESTDIR)$(LIBDIR)/libpalingenesis.so
	$(INSTALL) -m 0644 include/palingenesis.h $(DESTDIR)$(PREFIX)/include
	sed 's|@PREFIX@|$(PREFIX)|; s|@LIBDIR@|$(LIBDIR)|; s|@VERSION@|$(VERSION)|' packaging/palingenesis.pc \
		>$(DESTDIR)$(LIBDIR)/pkgconfig/palingenesis.pc
	chmod 0644 $(DESTDIR)$(LIBDIR)/pkgconfig/palingenesis.pc

# As install, without the symbols that only debuggers read: of copies, for strip writes
# into the file, which may be loaded.
install-strip:
	$(if $(NO_BUILD),,cargo build --release --workspace)
	$(INSTALL) -d $(BUILT)/stripped
	for file in libpalingenesis.so palingenesis palingenesis-worker; do \
		strip --strip-unneeded -o $(BUILT)/stripped/$$file $(BUILT)/$$file || exit; \
	done
	$(MAKE) --no-print-directory install NO_BUILD=1 BUILT=$(BUILT)/stripped

# The line before the file: plugstack.conf finds nothing to load, not a gap.
uninstall:
	rm -f $(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.conf \
		$(DESTDIR)$(PREFIX)/share/palingenesis/palingenesis.toml.example
	rm -f $(DESTDIR)$(LIBDIR)/libpalingenesis.so $(DESTDIR)$(LIBDIR)/libpalingenesis.so.0 \
		$(DESTDIR)$(LIBDIR)/palingenesis/spank_palingenesis.so $(DESTDIR)$(LIBDIR)/pkgconfig/palingenesis.pc $(DESTDIR)$(PREFIX)/include/palingenesis.h \
		$(DESTDIR)$(PREFIX)/bin/palingenesis $(DESTDIR)$(PREFIX)/bin/palingenesis-worker \
		$(DESTDIR)$(PREFIX)/sbin/palingenesis-enable $(DESTDIR)$(DOCDIR)/LICENSE $(DESTDIR)$(DOCDIR)/README.md \
		$(DESTDIR)$(DOCDIR)/THIRD-PARTY
	for name in palingenesis palingenesis-worker palingenesis-enable; do \
		rm -f $(DESTDIR)$(PREFIX)/share/man/man*/$$name.[1-8] $(DESTDIR)$(PREFIX)/share/man/man*/$$name[-.]*.[1-8] \
			$(DESTDIR)$(PREFIX)/share/bash-completion/completions/$$name $(DESTDIR)$(ZSHDIR)/_$$name \
			$(DESTDIR)$(PREFIX)/share/fish/vendor_completions.d/$$name.fish; \
	done
	for folder in $(DOCUMENTS); do \
		for file in $$folder/*.*; do rm -f "$(DESTDIR)$(DOCDIR)/$$file"; done; \
	done
	for file in $(DOCUMENTED); do rm -f "$(DESTDIR)$(DOCDIR)/$$file"; done
	-cd $(DESTDIR)$(DOCDIR) && rmdir $(DOCUMENTS) etc
	-rmdir $(DESTDIR)$(LIBDIR)/palingenesis $(DESTDIR)$(PREFIX)/share/palingenesis $(DESTDIR)$(DOCDIR)

packages: deb rpm

# SLURM only as it was given to make: in the environment it often is Slurm's directory.
deb:
	packaging/build-packages deb $(if $(filter command,$(firstword $(origin SLURM))),$(SLURM))

rpm:
	packaging/build-packages rpm $(if $(filter command,$(firstword $(origin SLURM))),$(SLURM))
