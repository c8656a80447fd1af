//! Where a store is: what its URL says.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use percent_encoding::percent_decode_str;
use redis::{ConnectionAddr, ConnectionInfo, IntoConnectionInfo, ProtocolVersion};
use redis::{RedisConnectionInfo, RedisResult};

use super::Keys;
use crate::ConfigError;
use crate::store::without_password;

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// The times that a deadline may have, and the one that it has unless it is given.
const DEADLINES: std::ops::RangeInclusive<Duration> =
    Duration::from_millis(1)..=Duration::from_secs(60);
const DEADLINE: Duration = Duration::from_millis(250);

/// Where a store is, and how it is to be spoken to.
///
/// - `redis://user:password@host:6379/0?prefix=myapp&timeout=250ms`; several hosts with commas between them,
///   each of which will do: all nodes of a cluster know where the prefix's slot is;
/// - `rediss://…` the same over TLS, which trusts whom the system does;
/// - `unix://user:password@/path/to/socket?prefix=myapp&db=0`;
/// - `redis+sentinel://host:26379,host/service/0?prefix=myapp`, with `rediss+sentinel://…` over TLS:
///   user and password are for the server, not the sentinels.
///
/// The prefix is required: it keeps applications apart. In user and password, `%` and two hexadecimal
/// digits are a byte.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Address {
    /// Each of which may know where to go.
    pub(super) nodes: Vec<ConnectionAddr>,
    /// What the server is called, where the nodes are sentinels.
    pub(super) service: Option<String>,
    user: Option<String>,
    password: Option<String>,
    database: i64,
    pub(super) keys: Keys,
    pub(super) timeout: Duration,
    /// The URL up to the query, without user and password.
    shown: String,
}

impl Address {
    /// Reads a URL.
    ///
    /// # Errors
    /// Says what of it is wrong and what is allowed, without the password.
    pub(crate) fn parse(url: &str) -> Result<Self, ConfigError> {
        let shown = without_password(url);
        let given = || format!("'{}'", shown.escape_debug());
        let (scheme, rest) = url.split_once("://").unwrap_or(("", url));
        // Before anything else: there may be a '?' in a password.
        let (login, rest) = rest.rsplit_once('@').unwrap_or(("", rest));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (hosts, path) = place.split_once('/').unwrap_or((place, ""));
        let is_tls = scheme.starts_with("rediss");
        let mut query = Query::parse(query)?;
        let (nodes, service, database) = match scheme {
            "redis" | "rediss" => (nodes(hosts, PORT, is_tls)?, None, path),
            "redis+sentinel" | "rediss+sentinel" => {
                let (service, database) = path.split_once('/').unwrap_or((path, ""));
                // A number alone is the database for other clients.
                let is_database = !path.contains('/') && path.parse::<u64>().is_ok();
                if service.is_empty() || is_database {
                    let allowed = "with the service's name after the hosts, as in \
                        'redis+sentinel://host:26379/service?prefix=myapp'";
                    return Err(refused(allowed, &given()));
                }
                let nodes = nodes(hosts, SENTINEL_PORT, is_tls)?;
                (nodes, Some(service.to_owned()), database)
            }
            "unix" if hosts.is_empty() && !path.is_empty() => {
                let path = PathBuf::from(format!("/{path}"));
                (vec![ConnectionAddr::Unix(path)], None, query.database)
            }
            _ => {
                let allowed = "redis://host, rediss://host (TLS), unix:///path or redis+sentinel://host/service";
                return Err(refused(allowed, &given()));
            }
        };
        if scheme != "unix" && !query.database.is_empty() {
            let allowed =
                "with the database behind the hosts, as in redis://host/5 ('db' is for sockets)";
            let given = format!("'db={}'", query.database.escape_debug());
            return Err(refused(allowed, &given));
        }
        let (user, password) = login.split_once(':').unwrap_or((login, ""));
        let database = if database.is_empty() { "0" } else { database };
        let database = database.parse::<u16>().map_err(|_| {
            refused(
                "with a database from 0 to 65,535",
                &format!("'{}'", database.escape_debug()),
            )
        })?;
        Ok(Self {
            nodes,
            service,
            user: decoded("user", user)?,
            password: decoded("password", password)?,
            database: database.into(),
            keys: query
                .keys
                .take()
                .ok_or_else(|| refused("with '?prefix=' and the application's name", &given()))?,
            timeout: query.timeout,
            shown,
        })
    }

    /// The URL with the prefix, and without user and password.
    pub(super) fn whole(&self) -> String {
        format!("{}?prefix={}", self.shown, self.keys.prefix)
    }

    /// How to speak to the server at a node.
    pub(super) fn server(&self, node: &ConnectionAddr) -> RedisResult<ConnectionInfo> {
        let mut settings = plain().set_db(self.database);
        if let Some(user) = &self.user {
            settings = settings.set_username(user);
        }
        if let Some(password) = &self.password {
            settings = settings.set_password(password);
        }
        Ok(node
            .clone()
            .into_connection_info()?
            .set_redis_settings(settings))
    }

    /// How to speak to a sentinel.
    pub(super) fn sentinel(node: &ConnectionAddr) -> RedisResult<ConnectionInfo> {
        let node = node.clone().into_connection_info()?;
        Ok(node.set_redis_settings(plain()))
    }
}

fn plain() -> RedisConnectionInfo {
    // The third version of the protocol tells when a connection ends that nobody waits at.
    RedisConnectionInfo::default()
        .set_protocol(ProtocolVersion::RESP3)
        .set_skip_set_lib_name()
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for Address {
    /// Without the password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address")
            .field("url", &self.shown)
            .field("keys", &self.keys)
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

/// What a URL says after the question mark.
struct Query<'a> {
    keys: Option<Keys>,
    timeout: Duration,
    /// Of a socket, whose path says it for hosts.
    database: &'a str,
}

impl<'a> Query<'a> {
    fn parse(text: &'a str) -> Result<Self, ConfigError> {
        let mut query = Self {
            keys: None,
            timeout: DEADLINE,
            database: "",
        };
        let mut names = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            if names.contains(&name) {
                let given = format!("'{}' again", name.escape_debug());
                return Err(refused("with each of its settings once", &given));
            }
            names.push(name);
            match name {
                "prefix" => query.keys = Some(Keys::new(value)?),
                "timeout" => query.timeout = deadline(value)?,
                "db" => query.database = value,
                // Its value may be a password.
                _ => {
                    let given = format!("'{}'", name.escape_debug());
                    return Err(refused(
                        "with 'prefix', 'timeout' or 'db' after '?'",
                        &given,
                    ));
                }
            }
        }
        Ok(query)
    }
}

fn refused(allowed: &str, value: &str) -> ConfigError {
    ConfigError::new("url", allowed, value)
}

fn nodes(hosts: &str, port: u16, is_tls: bool) -> Result<Vec<ConnectionAddr>, ConfigError> {
    let node = |host| {
        node(host, port, is_tls).ok_or_else(|| {
            let given = format!("'{}'", host.escape_debug());
            refused(
                "with hosts such as 'host', 'host:6379' or '[::1]:6379'",
                &given,
            )
        })
    };
    hosts.split(',').map(node).collect()
}

/// The node that another one tells of, spoken to the same way; that one's own host is left out sometimes.
pub(super) fn beside(node: &ConnectionAddr, text: &str) -> Option<ConnectionAddr> {
    let (ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. }) = node else {
        return None;
    };
    let is_tls = matches!(node, ConnectionAddr::TcpTls { .. });
    match text.strip_prefix(':') {
        Some(port) => self::node(&format!("{host}:{port}"), PORT, is_tls),
        None => self::node(text, PORT, is_tls),
    }
}

/// A host with a port or without; none where that is not what the text says.
fn node(text: &str, port: u16, is_tls: bool) -> Option<ConnectionAddr> {
    let (host, given) = match text.rsplit_once(':') {
        // The colon may be in an address in brackets.
        Some((host, given)) if !given.ends_with(']') => (host, Some(given)),
        _ => (text, None),
    };
    let port = given.map_or(Some(port), |given| given.parse().ok())?;
    let inner = host
        .strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'));
    let host = inner.unwrap_or(host).to_owned();
    // Only in brackets an address may hold colons; the cluster's answers have none around it.
    let is_host = !host.is_empty() && !host.contains(['[', ']', ' ', '%']);
    let host = is_host.then_some(host)?;
    Some(if is_tls {
        ConnectionAddr::TcpTls {
            host,
            port,
            insecure: false,
            tls_params: None,
        }
    } else {
        ConnectionAddr::Tcp(host, port)
    })
}

fn decoded(what: &'static str, text: &str) -> Result<Option<String>, ConfigError> {
    let decoded = percent_decode_str(text).decode_utf8();
    let decoded = decoded.map_err(|_| {
        let allowed = format!("with a {what} in UTF-8, '%' and two digits for a byte");
        refused(&allowed, "other bytes")
    })?;
    Ok((!decoded.is_empty()).then(|| decoded.into_owned()))
}

fn deadline(text: &str) -> Result<Duration, ConfigError> {
    let parse = |digits: &str| digits.parse::<u32>().ok().map(u64::from);
    let time = match text.strip_suffix("ms") {
        Some(digits) => parse(digits).map(Duration::from_millis),
        None => text
            .strip_suffix('s')
            .and_then(parse)
            .map(Duration::from_secs),
    };
    time.filter(|time| DEADLINES.contains(time)).ok_or_else(|| {
        let given = format!("'{}'", text.escape_debug());
        ConfigError::new(
            "timeout",
            "from '1ms' to '60s', a whole number of ms or s",
            given,
        )
    })
}
