"""Runs in Prometheus and Grafana: targets, alert rules (``alerts.yml``) and a dashboard (``dashboard.json``)."""
